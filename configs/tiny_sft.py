"""Teaches the model of configs/tiny.py to answer questions about a text.

Data: chats of the same small world; people and things meet in validation that never met in
training. Run configs/tiny.py first. Measured:

tokens  5.3 M, of which 0.58 M are answers, the only targets
loss    0.13 per target in validation; 73% of 1,000 questions answered exactly (evaluate.py); with
        two other seeds, of the base too, 0.13 and 0.11, 71% and 81%
time    12 to 14 minutes of one CPU core
memory  0.5 GiB
"""

init_from = "out/tiny_colours"
data = "tinyworld_chats"
max_seq_len = 256

max_steps = 3000
batch_size = 8
optimizer = "muon"
learning_rate = 2.5e-3
embedding_learning_rate = 5e-4
momentum = 0.8
warmup_steps = 50

eval_every = 500
save_every = 500
