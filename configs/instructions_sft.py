"""Fine-tunes a model on a file of instructions.

  python train.py configs/instructions_sft.py --data=PATH/instructions.json --init_from=out/tiny

Rows are {"instruction", "input", "output"}, or chats. Start from whatever you have trained.
Measured from out/tiny (0.9 M parameters) with 999 instructions, before the last changes of either
recipe: validation loss 2.88 per target at best, in 4.7 minutes on 2 CPU cores. That is too small a
model for real instructions: its answers have the form of answers, no more.
"""

data = "instructions.json"
init_from = "out/tiny"
max_seq_len = 256

max_steps = 1500
dropout = 0.1
batch_size = 4
optimizer = "muon"
learning_rate = 1e-2
embedding_learning_rate = 5e-3
warmup_steps = 20

eval_every = 500
save_every = 500
