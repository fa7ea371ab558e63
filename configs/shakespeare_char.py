"""Bytes of Shakespeare: nanoGPT's CPU budget, 2,000 steps of 12 x 64, for 779,648 parameters here.

  python train.py configs/shakespeare_char.py --data=PATH/tinyshakespeare.txt

The first 90% of the text trains, the last 10% validates. Measured:

tokens  1.5 M
loss    from ln(320) = 5.8 to 1.512 in validation (nanoGPT: 1.88); two other seeds 1.511, 1.517
time    109 s on 2 CPU cores; on a processor that multiplies in bf16, with a C++ compiler,
        --dtype=bf16 --compile=True takes 71 s (100 s the first time), to 1.511, 1.518 and 1.515
memory  0.7 GiB
"""

data = "tinyshakespeare.txt"
tokenizer = "bytes"
max_seq_len = 64
sample_prompt = "ROMEO:"
sample_tokens = 200

hidden_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 352

max_steps = 2000
batch_size = 12
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 3e-3
momentum = 0.8
warmup_steps = 100
ngram_weight = 0.9
ngram_last_weight = 0.3
ngram_order = 7

eval_every = 500
save_every = 1000
