#!/usr/bin/env bash
# Tests, then measures, on a machine with four or eight GPUs, and prints the tables:
#
#   benchmarks/run_many.sh W [COMMIT] [RESULTS]    the tests between W GPUs, then the path of five models over W ranks
#                                                  beside the baseline, at even and skewed routing
#
# A call ends within BUDGET_S seconds (530). Call it again with the same COMMIT to go on: tests that have passed, rows
# that are there and commands that have ended well are left out. What comes first matters most.
W=${1:?4 or 8}
budget=${BUDGET_S:-530}
source "$(dirname "$0")/_budget.sh"

[[ $W == 4 || $W == 8 ]] || { echo "W is 4 or 8, got $W"; exit 2; }
[[ $commit != unknown ]] || { echo "no COMMIT: a second call could not tell what is there"; exit 2; }
mkdir -p "$results"
ended=$results/run_many.txt
log=$results/tests_${W}_gpus_$commit.txt

# once NAME LIMIT COMMAND...: run, unless it has ended well for this commit
once() {
  local stamp="$commit, $W GPUs: $1"
  shift
  if grep -qsxF "$stamp" "$ended"; then
    echo "== ended well before: $stamp"
  else
    run "$@" && echo "$stamp" >>"$ended"
  fi
}

# path NAME ARGUMENTS...: the five models
path() {
  once "$1" "$budget" "${torchrun[@]}" "$W" -m benchmarks.bench_path --shapes "${models[@]}" "${rows[@]}" "${@:2}"
}

mapfile -t passed < <(sed -n 's/^\(tests.*\) PASSED.*/--deselect=\1/p' "$log" 2>/dev/null)
# pytest ends with 5 when all are deselected: they have passed, in a call that was ended before it could say so.
pytest='python3 -m pytest "$@"; code=$?; exit $((code == 5 && $# > 7 ? 0 : code))'
once tests 300 bash -c "$pytest" pytest tests/test_gpu_ranks.py tests/test_delays.py -v -m ranks -k "${W}_gpus" "${passed[@]}" > >(tee -a "$log")

skews=(balanced "zipf(1.0)" "hot_rank(2.0)")
((W == 4)) || skews+=("hot_rank(4.0)")
lean=(--methods ours graph baseline)
path even --routings uniform --tokens 8192 --methods ours graph baseline floor stages
for scheme in "per route" "de-duplicated"; do
  path "$scheme" --scheme "$scheme" --routings uniform --tokens 8192 --methods ours graph
done
path skewed --routings "${skews[@]}" --tokens 8192 "${lean[@]}"
path "one rank" --routings one_rank --tokens 8192 "${lean[@]}"
path half --routings uniform "${skews[@]}" one_rank --tokens 4096 "${lean[@]}"
path decode --routings uniform --tokens 16 128 --directions inference --methods ours graph baseline floor
path "skewed decode" --routings "${skews[@]}" one_rank --tokens 16 128 --directions inference "${lean[@]}"

python3 -m benchmarks.report --results "$results" --commit "$commit"
exit $failed
