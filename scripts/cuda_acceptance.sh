#!/usr/bin/env bash
# Accept, measure and report on one GPU, in at most 9 minutes: docs/cuda.md says what it does and what its rows mean.
#
#   bash scripts/cuda_acceptance.sh OUT                          on CUDA
#   bash scripts/cuda_acceptance.sh OUT --device cpu --quick     the same code at tiny sizes, without a GPU
#   bash scripts/cuda_acceptance.sh OUT --parts "profile peers"  some of it
#
# Uses the python3 of the PATH, or that of PYTHON=, and installs nothing.
set -uo pipefail
parts="machine contract right profile peers" device=cuda quick="" out=""
refuse() {
    echo "cuda_acceptance.sh: error: $1; see the head of this file" >&2
    exit 2
}
while (($#)); do
    case $1 in
    --device | --parts)
        [[ ${2-} ]] || refuse "$1 needs a value"
        printf -v "${1#--}" %s "$2" && shift
        ;;
    --quick) quick=--quick ;;
    -*) refuse "there is no option $1" ;;
    *) out=$1 ;;
    esac
    shift
done
[[ $out ]] || refuse "name a folder for the results"
[[ $device == cuda || $device == cpu ]] || refuse "--device must be cpu or cuda, got $device"
mkdir -p "$out" || refuse "$out cannot be made"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}
# Without beartype the layers run as they are written, and the rows of the shape checks say so.
"$python" -c "import beartype" 2>/dev/null || export JAXTYPING_DISABLE=1
rm -f "$out"/{summary.txt,results.jsonl,log.txt,profiles.json,profile.png,trace.json.gz,benchmarks.json,benchmarks.md}

# part LIMIT COMMAND...: run it for at most LIMIT seconds. Its rows are its own to write; a bad end is one more.
part() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    printf '%s (at most %s s) ... ' "$name" "$limit"
    printf '\n== %s ==\n' "$name" >>"$out/log.txt"
    timeout --foreground --signal=INT --kill-after=10 "$limit" "$@" >>"$out/log.txt" 2>&1
    code=$?
    echo "$((SECONDS - start)) s"
    local why="ended with exit code $code: see log.txt"
    ((code == 124 || code == 137)) && why="was cut off after $limit s"
    # 1 is what pytest ends with where a row has failed, and the machine without a GPU.
    if ((code > 1)) || [[ $code == 1 && ($name == profile || $name == peers) ]]; then
        printf '{"part": "%s", "name": "all of it", "status": "failed", "detail": "%s", "seconds": %s}\n' \
            "$name" "$why" "$((SECONDS - start))" >>"$out/results.jsonl"
    fi
    return "$code"
}
tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m pytest -p acceptance.rows --rows "$out/results.jsonl" -W default \
        --show-capture=no -q "$@"
}
on=(--device "$device" $quick)

# limit N: N seconds, or what is left of the 9 minutes. On a CPU, which may be busy and where no time counts, enough.
limit() {
    local left=$((525 - SECONDS))
    [[ $device == cpu ]] && echo 600 || echo $((left < $1 ? left : $1))
}

if part machine "$(limit 60)" "$python" -m acceptance.machine "$out" "${on[@]}"; then
    tests contract "$(limit 80)" tinyblock/contract ${quick:+-k "CUDA or (block and float32)"}
    tests right "$(limit 150)" tests/on_device "${on[@]}"
    seconds=$(limit 150)
    part profile "$seconds" "$python" -m acceptance.profiles "$out" "${on[@]}" --seconds $((seconds - 15))
    seconds=$(limit 525)
    part peers "$seconds" "$python" -m acceptance.peers "$out" "${on[@]}" --seconds $((seconds - 15))
fi
"$python" -m acceptance.summary "$out"
