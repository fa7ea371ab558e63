"""Teaches the model of configs/tiny.py to answer questions about a text.

Data: chats of the same small world; people and things meet in validation that never met in
training. Run configs/tiny.py first.
"""

init_from = "out/tiny"
data = "tinyworld_chats"
max_seq_len = 256

max_steps = 600
batch_size = 8
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 2e-3
warmup_steps = 50

eval_every = 150
save_every = 150
