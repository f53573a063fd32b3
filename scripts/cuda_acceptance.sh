#!/usr/bin/env bash
# Test, profile and compare on one GPU in less than nine minutes; docs/cuda.md explains the calls and the results.
#
#   bash scripts/cuda_acceptance.sh OUT                         everything, on CUDA
#   bash scripts/cuda_acceptance.sh OUT -k profiler             a part of it; all options of pytest work
#   bash scripts/cuda_acceptance.sh OUT --device cpu --quick    the same code at tiny sizes, without a GPU
#
# Runs the python3 on the PATH, or the one in PYTHON=, and installs nothing. LIMIT= sets the seconds (default: 520).
set -uo pipefail
if [[ -z ${1-} || $1 == -* ]]; then
    echo "cuda_acceptance.sh: error: the first argument must be a folder for the results, as in: $0 OUT" >&2
    exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift && cd "$(dirname "$0")/.." || exit 2
limit=${LIMIT:-520} python=${PYTHON:-python3}
# Without beartype the layers run unchecked, which the report states.
"$python" -c "import beartype" 2>/dev/null || export JAXTYPING_DISABLE=1
# The tests that have not started 20 s before the limit are skipped; a test that runs then has these 20 s left.
timeout --foreground --signal=INT --kill-after=10 "$limit" "$python" -m pytest -m cuda -W default --tb=short -rfExXs \
    --device cuda --out "$out" --seconds $((limit - 20)) --junitxml "$out/results.xml" "$@" \
    tests/on_device/test_{model,attention}.py tinyblock/contract tests/on_device/test_{profiler,peers}.py 2>&1 | tee -i "$out/log.txt"
