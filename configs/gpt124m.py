"""A model of GPT-2's smallest size on 10 billion tokens of educational web pages, on 8 GPUs.

  python -m data.prepare_fineweb_edu --tokens=10000000000
  torchrun --nproc_per_node=8 train.py configs/gpt124m.py

123,588,864 parameters: GPT-2's width, depth and 12 heads (without grouping), its tokenizer (50,257
ids, padded to 50,304) and its context, in this decoder's blocks. This recipe has never been run
to its end: the tests run 3 steps of it at reduced size and count its parameters; what follows is
read or computed.

tokens  a step holds 512 * 1,024 positions over all GPUs, 97% filled: half a million tokens. The
        pages of sample-10BT, once: 9.9 billion tokens, 19,500 steps. Some 50 GB of text on disk,
        20 GB more once tokenised, which the first process does before training begins.
loss    begins at ln(50304) = 10.8. Others' GPT-2 of 124 M parameters report about 3.2 for the same
        pages and budget; GPT-2 itself, as OpenAI released it, has 3.29 there.
time    798 MFLOP a token, 7.9e18 in all: at 40% of the peak, 42 minutes on 8 H100 (989 TFLOP/s
        each in bf16), 2.2 hours on 8 A100.
memory  of each GPU: 2.3 GB of weights, gradients and moments; 672 MiB of activations a row (counted
        in an eager bf16 forward on a CPU), 45 GB for 64 rows, less when compiled; 1 GB for the
        loss. With 40 GB: --batch_size=256 --grad_accum=2. One GPU: --batch_size=64 --grad_accum=8.

AdamW with 6e-4, falling to a tenth, is what GPT-3's paper gives this size (table 2.1).
"""

data = "data/fineweb_edu/pages.jsonl"
val_fraction = 0.0005
tokenizer = "gpt2"
max_seq_len = 1024

hidden_size = 768
num_hidden_layers = 12
num_attention_heads = 12
num_key_value_heads = None
intermediate_size = 2048

max_steps = 19_500
batch_size = 512
optimizer = "adamw"
learning_rate = 6e-4
min_lr_ratio = 0.1
weight_decay = 0.1
warmup_steps = 700

eval_every = 500
save_every = 1000
