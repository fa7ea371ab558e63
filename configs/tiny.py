"""A model of 0.9 M parameters that tells stories about a small world.

Data: made here (data/tinyworld.py), with a known floor: the loss of a perfect model.
"""

data = "tinyworld"
tokenizer = "bpe"
vocab_size = 1024
max_seq_len = 256
sample_prompt = "One day"

hidden_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 384

max_steps = 1500
batch_size = 8
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 3e-3
warmup_steps = 100

eval_every = 300
save_every = 500
