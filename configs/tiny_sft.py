"""Teaches the model of configs/tiny.py to answer questions about a text.

Data: chats of the same small world; people and things meet in validation that never met in
training. Run configs/tiny.py first.
"""

init_from = "out/tiny"
data = "tinyworld_chats"
max_seq_len = 256

max_steps = 1200
batch_size = 8
optimizer = "muon"
learning_rate = 5e-3
embedding_learning_rate = 1e-3
momentum = 0.8
warmup_steps = 50

eval_every = 300
save_every = 300
