#!/usr/bin/env bash
# Makes the gate that comes with the package for the embedded model, in four label runs that share no question:
#   fit-en, fit-zh   closed-book; a cheap fusion learns "known" from them
#   threshold        with passages; the threshold is chosen on it, and no figure is reported on it
#   test             with passages; all figures are from it. Nothing is fitted or set on it, but the rule that sets the
#                    threshold (--max-loss 0.01 --net) was picked among three with these figures in view
# Usage: benchmarks/default_gate.sh [--limit N] [--scratch DIR] [--out DIR]
#   --limit: for a trial: at most so many questions in a run to fit on, a fifth of that in the other two (200 is the least).
#   --scratch: where the runs are kept; a second call goes on. --out: folder of the gate; by default that of the package.
# Needs KNOWGATE_BENCH.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
limit=100000 scratch="" out="$here/src/knowgate/gates/packaged/smollm"
while [ $# -gt 0 ]; do
  case "$1" in
    --limit) limit="$2" ;;
    --scratch) scratch="$2" ;;
    --out) out="$2" ;;
    *) echo "unknown option $1; see the head of this file" >&2; exit 2 ;;
  esac
  shift 2
done
scratch="${scratch:-$(mktemp -d)}"
mkdir -p "$scratch"

part() { # NAME SET SPLIT FIRST LAST MOST: these lines of a data set as a file of their own
  local most=$(($6 < $5 - $4 + 1 ? $6 : $5 - $4 + 1))
  local last=$(($4 + most - 1))
  gzip -dc "$KNOWGATE_BENCH/$2/$3.jsonl.gz" | awk -v first="$4" -v last="$last" 'NR >= first && NR <= last' > "$scratch/$1.jsonl"
}
label() { # NAME OPTIONS
  local name="$1"
  shift
  knowgate label --data "jsonl:$scratch/$name.jsonl" --model smollm --samples 0 --out "$scratch/$name" "$@"
}

part fit-en triviaqa_ctx train 1 1500 "$limit"
part fit-zh webqa_zh_ctx train 1 700 "$limit"
part threshold triviaqa_ctx train 1501 2500 $((limit / 5))
part test triviaqa_ctx test 1 1000 $((limit / 5))
[ -f "$scratch/index/index.json" ] || knowgate index "$KNOWGATE_BENCH/corpus_triviaqa.jsonl.gz" --out "$scratch/index"
label fit-en --closed-book
label fit-zh --closed-book
label threshold --index "$scratch/index" --k 3
label test --index "$scratch/index" --k 3
knowgate fit fusion --cheap --target known --labels "$scratch/fit-en" --labels "$scratch/fit-zh" --out "$out"
knowgate calibrate "$out" --labels "$scratch/threshold" --max-loss 0.01 --net --held-out 0
knowgate eval --labels "$scratch/test" --gates "$out,logprob:first,logprob:mean,prompt" --out "$scratch/report"
