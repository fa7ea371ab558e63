"""Teaches the model of configs/tiny.py to find a word again, and to say what stood around it.

Before configs/tiny_sft.py: easy chats, about two or three people who have a thing and are in a
place, with questions for colour, holder and place. Heads begin anew for them (induction.py). Run
configs/tiny.py first. Measured:

tokens  1.4 M, of which 0.37 M are answers, the only targets
loss    0.001 per target in validation, with two other seeds 0.0000. After 200 steps 0.019, 0.009
        and 0.015
time    3 minutes of one CPU core
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
