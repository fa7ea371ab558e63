"""Bytes of Shakespeare without nanoGPT's CPU budget, but still on two CPU cores.

  python train.py configs/shakespeare_cpu.py --data=PATH/tinyshakespeare.txt

2,424,000 parameters, rows of 256 bytes, 2.9 M of them in all. Heads of 64, because torch's bf16
attention on a CPU is slow for small ones.
"""

data = "tinyshakespeare.txt"
tokenizer = "bytes"
max_seq_len = 256
sample_prompt = "ROMEO:"
sample_tokens = 200

hidden_size = 192
num_hidden_layers = 6
num_attention_heads = 3
num_key_value_heads = 1
intermediate_size = 512

max_steps = 1400
batch_size = 8
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 3e-3
momentum = 0.9
warmup_steps = 100
dtype = "bf16"
compile = True

eval_every = 200
save_every = 1400
