"""Makes a chat model of configs/minimind.py: full fine-tuning on MiniMind's chats, its budget.

  python -m data.prepare_minimind --stage=sft
  python train.py configs/minimind_sft.py

It starts from out/minimind, with the tokenizer and the chat template that came with it; to start
from MiniMind's own weights, --init_from=jingyaogong/minimind-3. 63,912,192 parameters. This recipe
has never been run to its end: the tests run 3 steps of it at reduced size and count its parameters;
what follows is read or computed.

tokens  905,728 chats at most in 1.6 GB: some 370 M tokens (at 4.3 bytes each), 740 M in two epochs.
        MiniMind takes 113,216 steps of 16 chats, each padded or cut to 768 tokens; here a step
        holds 16 * 768 positions, 97% filled, so 62,000 steps are two epochs. Only the answers are
        targets.
loss    MiniMind states none; a model of 10.8 M parameters that others trained on these chats
        reports 2.04, so this one should come out below 2.
time    412 MFLOP a token, 3.0e17 in all: at 40% of the peak, 3 hours on an RTX 3090, 13 minutes
        on an H100. MiniMind states 1.1 hours an epoch on a 3090.
memory  1.2 GB of weights, gradients and moments; 329 MiB of activations a row of 768 (counted in
        an eager bf16 forward on a CPU), 5.5 GB for 16 rows; under 1 GB for the loss.
"""

init_from = "out/minimind"
data = "data/minimind/sft_t2t_mini.jsonl"
val_fraction = 0.005
max_seq_len = 768

max_steps = 62_000
batch_size = 16
optimizer = "adamw"
learning_rate = 1e-5
min_lr_ratio = 0.1
weight_decay = 0.01
warmup_steps = 100

eval_every = 2000
save_every = 2000
