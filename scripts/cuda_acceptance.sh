#!/usr/bin/env bash
set -uo pipefail

help="usage: bash scripts/cuda_acceptance.sh OUT [--quick] [-k EXPRESSION] [--device cpu]

Test, profile and compare the layers on one GPU, and write reports, pictures, traces and figures into the folder OUT.
docs/cuda.md explains the results.

options:
  --quick          tiny sizes, which show that everything starts; no figure is judged
  -k EXPRESSION    a part of the tests, selected as by pytest: model, attention, contract, profiler, or peers
  --device cpu     run the same code without a GPU; requires --quick
  -h, --help       show this help

environment:
  LIMIT=SECONDS    end after this time (default: 520). Tests that have not started
                   20 s before this limit are skipped.
  PYTHON=PATH      the Python to use (default: python3). Nothing is installed.

A full run uses all of LIMIT; a run with --quick ends after a few minutes. The exit code is 0 if no test fails, 1 if
one fails, 2 for a wrong option, and 124 or 137 if a test was still running at the limit.

examples:
  bash scripts/cuda_acceptance.sh OUT --quick
  bash scripts/cuda_acceptance.sh OUT -k \"peers and eager\"
  LIMIT=3600 bash scripts/cuda_acceptance.sh OUT"

fail() {
    echo "cuda_acceptance.sh: error: $1" >&2
    exit 2
}

out=
device=cuda
quick=
expression=
while (($#)); do
    case $1 in
    -h | --help)
        echo "$help"
        exit 0
        ;;
    --quick) quick=--quick ;;
    --device | -k)
        (($# > 1)) || fail "$1 requires a value; --help shows examples"
        if [[ $1 == -k ]]; then expression=$2; else device=$2; fi
        shift
        ;;
    --device=*) device=${1#*=} ;;
    -*) fail "unknown option $1; --help lists the options" ;;
    *)
        [[ -z $out ]] || fail "only one folder can be given, got $out and $1"
        out=$1
        ;;
    esac
    shift
done
limit=${LIMIT:-520}
python=${PYTHON:-python3}
[[ -n $out ]] || fail "the folder for the results is missing, as in: bash scripts/cuda_acceptance.sh OUT"
[[ $device == cuda || $device == cpu ]] || fail "--device must be cuda or cpu, got $device"
[[ $device == cuda || -n $quick ]] || fail "--device cpu requires --quick: the full sizes take hours on a CPU"
[[ $limit =~ ^[0-9]+$ ]] && ((limit > 20)) || fail "LIMIT must be a whole number above 20, got $limit"
command -v "$python" >/dev/null || fail "there is no $python; set PYTHON= to a Python that has torch"
[[ $python != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
mkdir -p "$out" || fail "cannot make the folder $out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2

# Without beartype the layers run unchecked, which the reports state.
"$python" -c "import beartype" 2>/dev/null || export JAXTYPING_DISABLE=1

# A test that runs when no more are started has 20 s left.
timeout --foreground --signal=INT --kill-after=10 "$limit" "$python" -m pytest -m cuda -W default --tb=short -rfExXs \
    --device "$device" ${quick:+--quick} ${expression:+-k "$expression"} \
    --out "$out" --seconds $((limit - 20)) --junitxml "$out/results.xml" \
    tests/on_device/test_{model,attention}.py tinyblock/contract tests/on_device/test_{profiler,peers}.py 2>&1 |
    tee -i "$out/log.txt"
