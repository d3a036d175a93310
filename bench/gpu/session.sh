#!/usr/bin/env bash
# Everything worth measuring on one GPU, unattended, most valuable first; from a checkout, needing no network.
#
#   OUT=results bash bench/gpu/session.sh            the whole run, about 8 minutes
#   PARTS="decode soak" OUT=results bash bench/gpu/session.sh
#
# Some parts run only when they are named:
#   PARTS="build model split" OUT=results bash bench/gpu/session.sh     auto against fixed splits at 10, 25, 40 and 60 %
#   PARTS="build sanitizer" OUT=results bash bench/gpu/session.sh       kernel tests under compute-sanitizer
#   PARTS="build cpu" OUT=results bash bench/gpu/session.sh             the CPU's Q4_0 kernel alone, on all cores
#   PARTS="build model rebalance" OUT=results bash bench/gpu/session.sh
#   PARTS="build model lookahead stream_memory" OUT=results bash bench/gpu/session.sh
#
# A model that is there already is kept, so a second call on the same machine does not make it again. Parts have limits of
# their own and share one for all (TOTAL seconds), so a part that hangs costs no other its turn.
# Leaves in $OUT: session.log (everything printed), decode.json, split.json, prefill.json, prefill_http.json, interleave.json,
# http.json, rebalance.json, soak.json, expert_kernels_q4_0.json, tests.log, sanitizer.log.
# Settings by environment: SHAPE DTYPE LAYERS DEVICE SCRATCH PYTHON WHEELS TOTAL PARTS and the sizes below.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-bench/results/session}
SHAPE=${SHAPE:-qwen3-30b-a3b}
DTYPE=${DTYPE:-q4_0}
LAYERS=${LAYERS:-}
DEVICE=${DEVICE:-cuda}
SCRATCH=${SCRATCH:-/dev/shm}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
TOTAL=${TOTAL:-500}
PARTS=${PARTS:-build model decode prefill interleave prefill_http http tests soak}
SPLITS=${SPLITS:-0.25,0.4,0.5,0.6}
HTTP_SPLIT=${HTTP_SPLIT:-}
PREFILL_SPLITS=${PREFILL_SPLITS:-0.3}
PREFILL_RUNTIME=${PREFILL_RUNTIME:-local}
NEW=${NEW:-16,512,4096}
LONG=${LONG:-4096}
STREAMS=${STREAMS:-1,4}
TOKENS=${TOKENS:-200}
HTTP_TOKENS=${HTTP_TOKENS:-256}
FILL=${FILL:-32}
RESIDENCY=${RESIDENCY:-1.0,0.25}
KV=${KV:-16384}
SOAK=${SOAK:---steps 10000 --every 500 --residency 0.05}
SOAK_S=${SOAK_S:-40}
TESTS_S=${TESTS_S:-45}
SPLIT_S=${SPLIT_S:-330}
SANITIZED=${SANITIZED:-mailbox placed_plan experts token_mask sampling dense attention}
SANITIZER_S=${SANITIZER_S:-60}
CPU_THREADS=${CPU_THREADS:-$(($(nproc) > 2 ? $(nproc) - 2 : 1)) $(nproc)}
ARCH=${ARCH:-90}

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
exec > >(tee "$OUT/session.log") 2>&1
export PYTHONUNBUFFERED=1
export PYTHONPATH="/tmp/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
BYTES_NEEDED=$((${LAYERS:-48} * 380000000))
if (($(df --output=avail -B1 "$SCRATCH" | tail -1) < BYTES_NEEDED)); then
    echo "$SCRATCH is too small for the model; using ${TMPDIR:-/tmp}"
    SCRATCH=${TMPDIR:-/tmp}
fi
MODEL=$SCRATCH/session-$SHAPE-$DTYPE${LAYERS:+-$LAYERS}
BEGUN=$SECONDS

left() { echo $((TOTAL - (SECONDS - BEGUN))); }
wanted() { [[ " $PARTS " == *" $1 "* ]]; }
memory() { awk '/MemTotal|MemAvailable/ { printf "%s %.1f GiB  ", $1, $2 / 1048576 } END { print "" }' /proc/meminfo; }

# part NAME LIMIT COMMAND...: end it after its limit or at the end of all time, kill its group a little later.
part() {
    local name=$1 limit=$2 at=$SECONDS status
    shift 2
    (($(left) < limit)) && limit=$(left)
    if ((limit < 8)); then
        echo "=== $name: no time left"
        return 1
    fi
    echo "=== $name (at most $limit s; $((SECONDS - BEGUN)) s so far; $(memory))"
    timeout -k 12 "$limit" "$@"
    status=$?
    echo "=== $name: exit $status after $((SECONDS - at)) s"
    return $status
}

synth() {
    $PYTHON -m freetoken.cli.main synth "$SHAPE" "$1" --dtype "$DTYPE" ${2:+--layers "$2"} --measure-tokens 64 --overwrite
}

build() {
    if [[ -d $WHEELS ]]; then
        $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \
            "$WHEELS"/*.whl || echo "the wheels could not be installed"
    fi
    $PYTHON -m pip install -q --no-index --no-build-isolation --no-deps -e .
}

# The model and, beside it, every kernel into Triton's cache.
model() {
    local compiling=
    if [[ $DEVICE == cuda && $ARCH != 0 ]]; then
        $PYTHON bench/gpu/compile_program.py --arch "$ARCH" --dtype "$DTYPE" --shape "$SHAPE" --jobs 10 \
            >"$OUT/compile.log" 2>&1 &
        compiling=$!
    fi
    local status=0
    if [[ -f $MODEL/ftw.json ]]; then
        echo "$MODEL is there already"
    else
        synth "$MODEL" "$LAYERS"
        status=$?
    fi
    if [[ -n $compiling ]]; then
        wait $compiling
        echo "compiling: exit $?"
        cut -c1-160 "$OUT/compile.log" | tail -25
        rm -f "$OUT/compile.log"
    fi
    return $status
}
export -f synth build model
export OUT SHAPE DTYPE LAYERS DEVICE SCRATCH PYTHON WHEELS MODEL ARCH

echo "$(date -u +%FT%TZ) $(git rev-parse --short HEAD 2>/dev/null) $(nproc) processors, $(memory)"
df -h "$SCRATCH" | cat
nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader \
    2>/dev/null

wanted build && part build 70 bash -c build
if wanted model; then
    if ! part model 65 bash -c model && [[ ! -f $MODEL/ftw.json ]]; then
        LAYERS=8
        MODEL=$SCRATCH/session-$SHAPE-$DTYPE-$LAYERS
        echo "falling back to $LAYERS layers"
        rm -rf "$SCRATCH/session-$SHAPE-$DTYPE"
        part "model, fewer layers" 25 bash -c 'synth "$0" "$1"' "$MODEL" "$LAYERS"
    fi
fi

COMMON=(--model "$MODEL" --device "$DEVICE")
wanted decode && part decode 70 $PYTHON bench/system/decode.py "${COMMON[@]}" --in-process --residency "$RESIDENCY" \
    --split "$SPLITS" --tokens "$TOKENS" --warm-up 60 --fill-tokens "$FILL" --kv-tokens "$KV" --trace --mailbox \
    --out "$OUT/decode.json"

# It ends itself a little before its limit.
wanted split && part split "$SPLIT_S" $PYTHON bench/system/split.py "${COMMON[@]}" --fill-tokens "$FILL" --kv-tokens "$KV" \
    --seconds $((($(left) < SPLIT_S ? $(left) : SPLIT_S) - 30)) --wrong ${SPLIT_OPTIONS:-} --out "$OUT/split.json"

wanted lookahead && part lookahead 110 $PYTHON bench/gpu/lookahead.py "${COMMON[@]}" --residency 0.25 --fill-tokens "$FILL" \
    --kv-tokens "$KV" ${LOOKAHEAD_OPTIONS:-} --out "$OUT/lookahead.json"

wanted stream_memory && part stream_memory 30 $PYTHON bench/gpu/stream_memory.py --out "$OUT/stream_memory.json"

wanted cpu && part cpu 60 $PYTHON bench/micro/expert_kernels.py --dtype q4_0 --threads $CPU_THREADS --tokens 1 4 16 \
    --out "$OUT/expert_kernels_q4_0.json"

wanted prefill && part prefill 60 $PYTHON bench/system/prefill.py "${COMMON[@]}" --in-process --residency 0.25 \
    --new "$NEW" --split "$PREFILL_SPLITS" --repeats 5 --kv-tokens "$KV" --trace --out "$OUT/prefill.json"

# It ends itself before its limit: what it could not measure is named in the result.
wanted interleave && part interleave 55 $PYTHON bench/system/interleave.py "${COMMON[@]}" --residency 0.25 --long "$LONG" \
    --streams "$STREAMS" --split "${INTERLEAVE_SPLIT:-0.3}" --repeats 2 --solo-tokens 32 --seconds 40 --kv-tokens "$KV" \
    --out "$OUT/interleave.json"

if wanted http || wanted prefill_http; then
    # The split that was best in process.
    HTTP_SPLIT=${HTTP_SPLIT:-$($PYTHON - "$OUT/decode.json" <<'PY'
import json, sys
try:
    runs = json.load(open(sys.argv[1]))["figures"]["runs"]
    print(min((r for r in runs if r["residency"] == 0.25), key=lambda r: r["ms_per_token"])["split"])
except Exception:
    print(0.4)
PY
    )}
    # Where a machine's memory grows with its use, make it grow before the boot plan looks at what is available.
    $PYTHON - "$MODEL" <<'PY'
import pathlib, sys, time
import numpy, psutil
need = 1.15 * sum(f.stat().st_size for f in pathlib.Path(sys.argv[1]).glob("*.ftw")) + (3 << 30)
begun, held = time.monotonic(), []
while psutil.virtual_memory().available + (len(held) << 30) < need and time.monotonic() - begun < 15:
    held.append(numpy.full(1 << 30, 1, numpy.uint8))
print(f"memory: {need / 2**30:.1f} GiB needed, {psutil.virtual_memory().available / 2**30:.1f} GiB available beside {len(held)} held")
PY
    wanted prefill_http && part prefill_http 75 $PYTHON bench/system/prefill.py "${COMMON[@]}" --runtime "$PREFILL_RUNTIME" \
        --residency 0.25 --new "$NEW" --split "$HTTP_SPLIT" --repeats 5 --kv-tokens "$KV" --ready-timeout 45 \
        --out "$OUT/prefill_http.json"
    wanted http && part http 95 $PYTHON bench/system/decode.py "${COMMON[@]}" --runtime ray,local --residency 0.25 --split "$HTTP_SPLIT" \
        --tokens "$HTTP_TOKENS" --warm-up 64 --kv-tokens "$KV" --ready-timeout 45 --out "$OUT/http.json"
fi

if wanted tests; then
    # Most of their time goes into compiling, so several processes share them where pytest-xdist is there.
    SPREAD=$($PYTHON -c 'import xdist; print("-n 5")' 2>/dev/null)
    part tests "$TESTS_S" bash -c "$PYTHON -m pytest -q --maxfail=8 $SPREAD -p no:cacheprovider -W ignore ${TESTS:-tests/gpu} >'$OUT/tests.log' 2>&1"
    tail -25 "$OUT/tests.log" | cut -c1-220
fi

# The kernels' small tests, file by file, first without the sanitizer, which leaves them compiled. Without PyTorch's pool
# of memory each tensor has an allocation of its own, so the sanitizer sees what runs past its end: that it does is seen
# first, by a kernel that does run past its end. All reports go into one file.
if wanted sanitizer; then
    SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)}
    [[ -n $SANITIZER ]] || echo "no compute-sanitizer here: the tests run without it"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    REPORT=$OUT/sanitizer.log
    : >"$REPORT"
    if [[ -n $SANITIZER ]]; then
        part "past the end, sanitizer" "$SANITIZER_S" bash -c "'$SANITIZER' --tool memcheck --error-exitcode 9 \
            $PYTHON bench/gpu/past_the_end.py >>'$REPORT' 2>&1"
        [[ $? == 9 ]] && echo "the sanitizer sees what it should" || echo "THE SANITIZER IS BLIND: what follows says nothing"
    fi
    for name in $SANITIZED; do
        SMALL="$PYTHON -m pytest -q -p no:xdist -p no:cacheprovider -W ignore tests/kernels/test_triton_$name.py"
        part "$name" "$SANITIZER_S" bash -c "$SMALL >>'$REPORT' 2>&1"
        tail -2 "$REPORT" | cut -c1-220
        [[ -n $SANITIZER ]] || continue
        part "$name, sanitizer" "$((2 * SANITIZER_S))" bash -c "'$SANITIZER' --tool memcheck --error-exitcode 9 \
            $SMALL >>'$REPORT' 2>&1"
        tail -3 "$REPORT" | cut -c1-220
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
fi

wanted rebalance && part rebalance "${REBALANCE_S:-150}" $PYTHON bench/system/rebalance.py "${COMMON[@]}" --runtime "${REBALANCE_RUNTIME:-ray}" \
    --residency 0.4 --split "${HTTP_SPLIT:-0.3}" --kv-tokens "$KV" --rounds "${ROUNDS:-20}" --ready-timeout 60 \
    ${REBALANCE_OPTIONS:-} --out "$OUT/rebalance.json"

wanted soak && part soak "$SOAK_S" $PYTHON bench/gpu/soak.py "${COMMON[@]}" $SOAK --seconds $(($(left) < SOAK_S ? $(left) - 4 : SOAK_S - 4)) \
    --out "$OUT/soak.json" | cut -c1-300

echo "=== all: $((SECONDS - BEGUN)) s"
ls -l "$OUT"
sleep 1 # for tee
