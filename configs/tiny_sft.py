"""Teaches the model of configs/tiny.py to answer questions about a text.

Data: chats of the same small world; people and things meet in validation that never met in
training. Run configs/tiny.py and configs/tiny_easy.py first. Measured:

tokens  6.9 M, of which 1.9 M are answers, the only targets
loss    0.005 per target in validation; 98.3% of 1,000 questions answered exactly (evaluate.py);
        with two other seeds, of the two runs before it too, 98.6% and 98.5%
time    16 minutes of one CPU core
memory  0.5 GiB
"""

init_from = "out/tiny_easy"
data = "tinyworld_chats"
max_seq_len = 256

max_steps = 4000
batch_size = 8
optimizer = "muon"
learning_rate = 2.5e-3
embedding_learning_rate = 5e-4
momentum = 0.8
warmup_steps = 50

eval_every = 500
save_every = 500
