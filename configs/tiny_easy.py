"""Teaches the model of configs/tiny.py to find a word again from the word behind it.

Before configs/tiny_sft.py: chats about two or three things, which ask for the colour of each. One
group of heads begins anew for it (induction.py). Run configs/tiny.py first. Measured:

tokens  0.6 M, of which 0.11 M are answers, the only targets
loss    0.0004 per target in validation, with two other seeds 0.0006 and 0.0004; without the new
        heads 0.0845, which is a guess by elimination
time    a minute of one CPU core
memory  0.5 GiB
"""

init_from = "out/tiny"
data = "tinyworld_easy"
induction_init = True
max_seq_len = 256

max_steps = 800
batch_size = 8
optimizer = "muon"
learning_rate = 2.5e-3
embedding_learning_rate = 5e-4
momentum = 0.8
warmup_steps = 50

eval_every = 100
save_every = 800
