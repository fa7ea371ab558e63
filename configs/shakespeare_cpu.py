"""Bytes of Shakespeare without nanoGPT's CPU budget, but still on two CPU cores.

  python train.py configs/shakespeare_cpu.py --data=PATH/tinyshakespeare.txt

2,424,000 parameters. Heads of 64, because torch's bf16 attention on a CPU is slow for small ones.
The file is for a processor that multiplies in bf16, and a C++ compiler; without them, --dtype=fp32
and --compile=False are slower and need neither. Measured:

tokens  1.6 M, 800 steps of 8 rows of 256
loss    1.447 in validation; with two other seeds 1.454 and 1.452. Below nanoGPT's 1.4697, from a
        GPU, at step 700
time    2.3 minutes of training on 2 CPU cores, 17 s before it, 44 where nothing is compiled yet
memory  0.9 GiB
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

max_steps = 800
batch_size = 8
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 3e-3
momentum = 0.9
warmup_steps = 100
ngram_weight = 0.9
ngram_last_weight = 0.3
ngram_order = 7
dtype = "bf16"
compile = True

eval_every = 100
save_every = 800
