"""MiniMind-3's shape on MiniMind's own texts and budget: two epochs of Chinese and English.

  python -m data.prepare_minimind --stage=pretrain
  hf download jingyaogong/minimind-3 tokenizer.json tokenizer_config.json --local-dir data/minimind
  python train.py configs/minimind.py      (on N GPUs: torchrun --nproc_per_node=N train.py ...)

63,912,192 parameters. This recipe has never been run to its end: the tests run 3 steps of it at
reduced size and count its parameters; what follows is read or computed.

tokens  1,270,238 rows in 1.2 GB: some 280 M tokens (at 4.3 bytes each), 560 M in two epochs.
        MiniMind takes 9,924 steps of 256 rows, each padded or cut to 340 tokens; here a step holds
        256 * 340 positions, 97% filled, and no text is cut, so 6,600 steps are two epochs.
loss    begins at ln(6400) = 8.8. MiniMind states none for the end; a model of 10.8 M parameters
        that others trained on these texts reports 2.27, so this one should come out below 2.2.
time    396 MFLOP a token, 2.2e17 in all: at 40% of the peak, 2.2 hours on an RTX 3090 (71 TFLOP/s
        in bf16), 9 minutes on an H100. MiniMind states 1.2 hours an epoch on a 3090.
memory  1.2 GB of weights, gradients and moments; 145 MiB of activations a row of 340 (counted in
        an eager bf16 forward on a CPU), 4.9 GB for 32 rows; under 1 GB for the loss.

The optimizer is MiniMind's, AdamW at 5e-4 falling to a tenth, so that the curves can be compared.
"""

data = "data/minimind/pretrain_t2t_mini.jsonl"
val_fraction = 0.005
tokenizer = "data/minimind"
max_seq_len = 340

hidden_size = 768
num_hidden_layers = 8
num_attention_heads = 8
num_key_value_heads = 4
head_dim = 96
intermediate_size = 2432
max_position_embeddings = 32768
rope_theta = 1e6
rms_norm_eps = 1e-6

max_steps = 6600
batch_size = 32
grad_accum = 8
optimizer = "adamw"
learning_rate = 5e-4
min_lr_ratio = 0.1
weight_decay = 0.01
warmup_steps = 100

eval_every = 500
save_every = 500
