#!/usr/bin/env bash
# Measures on a machine with one or two H200s, and prints the tables:
#
#   benchmarks/run_h200.sh one [COMMIT] [RESULTS]    one GPU, under 4 minutes: the products of five models, then the
#                                                    path of two virtual ranks
#   benchmarks/run_h200.sh two [COMMIT] [RESULTS]    two GPUs, under 6 minutes: the path of five models beside baseline
#                                                    and floor, with the table of its stages
#   benchmarks/run_h200.sh ops [COMMIT] [RESULTS]    one GPU, under 3 minutes: the ops that move and mix rows
#
# Call it again to go on: rows that are there with the same COMMIT are not measured again. Every command has a limit of
# its own; one that fails or runs past it leaves the others alone.
set -uo pipefail
cd "$(dirname "$0")/.."

mode=${1:?one, two or ops}
commit=${2:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
results=${3:-benchmarks/results}
models=(qwen3-30b deepseek-v3 qwen3-235b mixtral-8x7b gpt-oss-120b)
declare -A seconds=([one]=230 [two]=350 [ops]=170)
budget=${seconds[$mode]:?one, two or ops}
failed=0
export PYTHONUNBUFFERED=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0

# run LIMIT COMMAND...: at most LIMIT seconds, and never past the budget
run() {
  local limit=$1 left=$((budget - SECONDS))
  shift
  if ((left < 20)); then
    echo "== ${SECONDS} s: no time left for $*"
    failed=1
    return
  fi
  echo "== ${SECONDS} s: $*"
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" || {
    echo "== ${SECONDS} s: exit code $? of $*"
    failed=1
  }
}

# Only the rows that this commit still lacks cost time.
common=(--commit "$commit" --results "$results" --routings uniform --tokens 8192)

python3 -c 'import dist_moe' 2>/dev/null || python3 -m pip install -q --no-deps --no-build-isolation -e .

case $mode in
one)
  run 130 python3 -m benchmarks.bench_op --shapes "${models[@]}" "${common[@]}"
  run 90 python3 -m benchmarks.bench_path --virtual 2 --shapes qwen3-30b "${common[@]}" \
    --methods ours graph baseline floor stages
  ;;
two)
  for model in "${models[@]}"; do
    run 90 python3 -m torch.distributed.run --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29511 \
      -m benchmarks.bench_path --shapes "$model" "${common[@]}" --methods ours graph baseline floor stages
  done
  ;;
ops)
  run 150 python3 -m benchmarks.bench_op --shapes qwen3-30b deepseek-v3 "${common[@]}" \
    --ops publish route dispatch swiglu swiglu_backward combine reduce
  ;;
esac
python3 -m benchmarks.report --results "$results" --commit "$commit"
exit $failed
