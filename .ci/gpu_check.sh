#!/usr/bin/env bash
# Everything that only a CUDA card can show, in under 8 minutes: the tests marked gpu, then bench.py
# with few rounds. Run it from anywhere, in the environment of the project:
#
#   .ci/gpu_check.sh
#
# What it prints also goes to gpu_check.log, in $OUT or in out/gpu_check/. It exits with 1 if a test
# or a benchmark fails, and with 2 where there is no CUDA device. Each part has a time limit; one
# that is cut short says so and keeps what it had printed, and is not a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 WANDB_MODE=offline PYTHONUNBUFFERED=1
log_directory=${OUT:-out/gpu_check}
mkdir -p "$log_directory"
exec > >(tee "$log_directory/gpu_check.log") 2>&1

date -u
python - <<'END' || exit 2
import sys

import torch

print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}")
if not torch.cuda.is_available():
    print("There is no CUDA device that torch can use here, so nothing was checked.")
    sys.exit(1)
card = torch.cuda.get_device_properties(0)
print(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} processors")
print(f"bf16 {torch.cuda.is_bf16_supported()}, capability {card.major}.{card.minor}")
END
nvidia-smi --query-gpu=name,driver_version,clocks.sm,utilization.gpu --format=csv || true

failures=0

# part SECONDS COMMAND...: run a command for at most so long
part() {
  local limit=$1
  shift
  printf '\n=== %s\n' "$*"
  SECONDS=0
  timeout --kill-after=5 "$limit" "$@"
  local code=$?
  if [ $code = 124 ] || [ $code = 137 ]; then
    echo "=== cut short after $SECONDS seconds, its limit"
  elif [ $code = 0 ]; then
    echo "=== went well, $SECONDS seconds"
  else
    echo "=== failed with exit code $code, $SECONDS seconds"
    failures=1
  fi
}

# 180 + 30 + 110 + 140 = 460 seconds, and some for the starts
part 180 python -m pytest -q -m gpu -rs tests
part 30 python bench.py loss --device=cuda --rounds=2
part 110 python bench.py decode --device=cuda --rounds=2
part 140 python bench.py train --device=cuda --rounds=2

printf '\n'
date -u
if [ $failures = 0 ]; then echo "Nothing failed."; else echo "Something failed: see above."; fi
echo "All of it is in $log_directory/gpu_check.log"
exit $failures
