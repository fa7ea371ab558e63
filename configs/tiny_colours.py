"""Teaches the model of configs/tiny.py to find a word again from the word behind it.

Half a minute before configs/tiny_sft.py: chats about two or three things, which ask for the colour
of each. One group of heads begins anew for it (induction.py); without that, nothing is learned here
in ten times as long (docs/recipes.md). Run configs/tiny.py first. Measured:

TODO
"""

init_from = "out/tiny"
data = "tinyworld_colours"
induction_init = True
max_seq_len = 256

max_steps = 300
batch_size = 8
optimizer = "muon"
learning_rate = 2.5e-3
embedding_learning_rate = 5e-4
momentum = 0.8
warmup_steps = 50

eval_every = 100
save_every = 300
