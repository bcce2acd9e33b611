#!/usr/bin/env bash
# Makes the gate that comes with the package for the embedded model: labels two training sets closed-book and fits a cheap
# fusion on "known". Some twenty minutes on two cores. Needs KNOWGATE_BENCH. Usage: benchmarks/default_gate.sh [SCRATCH]
set -euo pipefail
scratch="${1:-$(mktemp -d)}"
here="$(cd "$(dirname "$0")/.." && pwd)"
label() { knowgate label --data "bench:$1/train" --model smollm --limit "$2" --samples 0 --closed-book --out "$scratch/$1-train"; }
label triviaqa_ctx 1500
label webqa_zh_ctx 700
knowgate fit fusion --cheap --target known --threshold 0.7 \
  --labels "$scratch/triviaqa_ctx-train" --labels "$scratch/webqa_zh_ctx-train" --out "$here/src/knowgate/gates/packaged/smollm"
