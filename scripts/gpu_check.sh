#!/usr/bin/env bash
# Prove, test, tune and time the Hopper kernels on a host with one GPU, torch, triton, numpy and pytest, and no network.
#   bash scripts/gpu_check.sh [OUT]      about ten minutes; OUT (default: $OUT, else ./gpu_out) gets all.tgz
# Order: compile on all cores what gates need and every candidate tile, gates (their records are copied), tests, tuning, benchmark. A stage
# has its own time limit and leaves the others alone if it fails. A short summary is printed last. COMMIT names the
# commit in the tables that are made; ONLY, words such as "gates tune", leaves out the other stages.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-gpu_out}}
logs=$(mktemp -d)
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)}
python=${PYTHON:-python3}
commit=${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}
begin=$SECONDS

stage() { # group_name, seconds, command...
    local name=$1 limit=$2 from=$SECONDS
    shift 2
    if [[ " ${ONLY:-compile gates tests tune bench} host " != *" ${name%%_*} "* ]]; then return 0; fi
    timeout -k 5 "$limit" "$@" > "$logs/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code, $((SECONDS - from)) s (124: ran past $limit s)" >> "$logs/stages.txt"
}

keep() { # what there is, in one file, since few files come back from some hosts
    tar -C "$logs" -czf "$out/all.tgz.new" . && mv "$out/all.tgz.new" "$out/all.tgz"
}

pytest() { # name of a file of tests/gpu
    stage "tests_$1" 170 "$python" -m pytest "tests/gpu/test_$1.py" -q $parallel --timeout 160 -p no:cacheprovider
}

stage host 30 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))'
cat "$logs/host.log" "$logs/stages.txt"
if grep -q 'exit [^0]' "$logs/stages.txt"; then exit 1; fi # no device: nothing below would say anything
parallel=$("$python" -c 'import xdist; print("-n 4")' 2> /dev/null)
stage compile_gates 120 "$python" scripts/warm_sm90.py
stage compile_tiles 70 "$python" scripts/tune_sm90.py --compile-only
regions="attention combine embedding experts gdn gdn_cpr linear logprob mla rmsnorm rope router row_linear swiglu"
regions+=" decoder decoder_hybrid decoder_hybrid_moe decoder_mla decoder_moe"
for region in $regions; do
    stage "gates_$region" 200 "$python" -m skyrl_isoexec.gate --arch sm90 --region "$region" &
done
wait
mkdir -p "$logs/records" && cp skyrl_isoexec/gate/records/sm90/*.json "$logs/records/" 2> /dev/null
keep
for name in product rows attention gdn moe mla; do pytest "$name" & done
wait
keep
stage tune 130 "$python" scripts/tune_sm90.py --seconds 110 --commit "$commit" --out "$logs"
keep
stage bench 60 "$python" -m skyrl_isoexec.bench layers --quick --seconds 45 --out "$logs/bench.json"
stage bench_gdn 120 "$python" -m skyrl_isoexec.bench gdn --unproved --out "$logs/bench_gdn.json"
keep

for region in $regions; do
    echo "== gate $region"
    grep -vE "equal$|^\[" "$logs/gates_$region.log" 2> /dev/null | cut -c1-200 | tail -8
    grep -E "passed:" "$logs/gates_$region.log" 2> /dev/null
done
for log in tests_product tests_rows tests_attention tests_gdn tests_moe tests_mla; do
    echo "== $log"
    grep -E "^(FAILED|ERROR)|^E  |passed|failed|skipped" "$logs/$log.log" 2> /dev/null | cut -c1-220 | tail -12
done
echo "== tune"
grep -E "compiled|^prefill|shapes;" "$logs/tune.log" 2> /dev/null | cut -c1-400
echo "== bench"
grep -E "refuses|ratio" "$logs/bench.log" 2> /dev/null | cut -c1-150 | tail -50
tail -20 "$logs/bench_gdn.log" 2> /dev/null | cut -c1-150
echo "== stages, $((SECONDS - begin)) s in all"
cat "$logs/stages.txt"
if grep -q "exit [^0]" "$logs/stages.txt"; then exit 1; fi
