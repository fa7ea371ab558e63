"""Teaches the model of configs/tiny.py to answer questions about a text.

Data: chats of the same small world; people and things meet in validation that never met in
training. Run configs/tiny.py first. Measured, one seed:

tokens  2.2 M, of which 0.2 M are answers, the only targets
loss    0.18 per target in validation; 68% of 1,000 questions answered exactly (evaluate.py)
time    4.8 minutes on 2 CPU cores, at a time when they were about half as fast as at their best
memory  0.5 GiB
"""

init_from = "out/tiny"
data = "tinyworld_chats"
max_seq_len = 256

max_steps = 3000
batch_size = 8
optimizer = "muon"
learning_rate = 5e-3
embedding_learning_rate = 1e-3
momentum = 0.8
warmup_steps = 50

eval_every = 500
save_every = 500
