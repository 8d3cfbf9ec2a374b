# Sourced by scripts `MODE [COMMIT] [RESULTS]` that end in time: they set budget, in seconds.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commit=${2:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
results=${3:-benchmarks/results}
models=(qwen3-30b deepseek-v3 qwen3-235b mixtral-8x7b gpt-oss-120b)
rows=(--commit "$commit" --results "$results")
# Followed by the number of processes.
torchrun=(python3 -m torch.distributed.run --nnodes 1 --master-addr 127.0.0.1 --master-port 29511 --nproc-per-node)
failed=0
export PYTHONUNBUFFERED=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0

# run LIMIT COMMAND...: at most LIMIT seconds, and never past the budget
run() {
  local limit=$1 left=$((budget - SECONDS)) code
  shift
  if ((left < 20)); then
    echo "== ${SECONDS} s: no time left for $*"
    failed=1
    return 1
  fi
  echo "== ${SECONDS} s: $*"
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" && return
  code=$?
  echo "== ${SECONDS} s: exit code $code of $*"
  failed=1
  return $code
}

python3 -c 'import dist_moe' 2>/dev/null || python3 -m pip install -q --no-deps --no-build-isolation -e .
