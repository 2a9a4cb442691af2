#!/usr/bin/env bash
# Check, tune and time the Hopper kernels on a host with one GPU, torch, triton, numpy and pytest, and no network.
#   bash scripts/gpu_check.sh [OUT]      about nine minutes; OUT (default: $OUT, else ./gpu_out) gets logs and JSON
# Every stage has its own time limit, and a stage that fails leaves the others alone. A short summary is printed last.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-gpu_out}}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=. TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)}
python=${PYTHON:-python3}

stage() { # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code, $((SECONDS - begin)) s (124: ran past $limit s)" | tee -a "$out/stages.txt"
}

: > "$out/stages.txt"
stage host 30 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))'
cat "$out/host.log"
if grep -q 'exit [^0]' "$out/stages.txt"; then exit 1; fi # no device: nothing below would say anything
parallel=$("$python" -c 'import xdist; print("-n 4")' 2> /dev/null)
# compilation is most of a first run: several processes share the GPU and the cache of compiled kernels
stage tests_product 230 "$python" -m pytest tests/gpu/test_product.py -q $parallel --timeout 200 -p no:cacheprovider &
stage tests_rows 230 "$python" -m pytest tests/gpu/test_rows.py -q $parallel --timeout 200 -p no:cacheprovider &
stage tests_attention 230 "$python" -m pytest tests/gpu/test_attention.py -q $parallel --timeout 200 -p no:cacheprovider &
wait
stage tune 170 "$python" scripts/tune_sm90.py --seconds 150 --out "$out"
stage bench 110 "$python" -m skyrl_isoexec.bench layers --quick --seconds 95 --out "$out/bench.json"
for log in tests_product tests_rows tests_attention; do
    echo "== $log"
    grep -E "^(FAILED|ERROR)|^E  |passed|failed|skipped" "$out/$log.log" | cut -c1-220 | tail -25
done
echo "== tune"
tail -45 "$out/tune.log" | cut -c1-170
echo "== bench"
tail -60 "$out/bench.log" | cut -c1-170
echo "== stages"
cat "$out/stages.txt"
if grep -q "exit [^0]" "$out/stages.txt"; then exit 1; fi
