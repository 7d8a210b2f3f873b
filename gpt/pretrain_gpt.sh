#!/bin/bash
# Pretrain a GPT with msrun, from any directory:
#
#   bash gpt/pretrain_gpt.sh [--world N] [--config FILE...] [any other flag]
#
# --world N        ranks to start (default: as many as the layout of the configuration needs, on Ascend all cards)
# --config FILE... yaml files; default: gpt/config/38BV3 on Ascend, else configs/cpu_default
#                  every other flag goes to pretrain_gpt.py and lies over the files (--train-iters 500, ...); flags of a
#                  model without --config are Megatron's: nothing lies beneath them; with --use-checkpoint-args --load FOLDER
#                  model, vocabulary and tokenizer are the folder's, the layout what is typed, the rest the files'
#
# Logs are written to ./msrun_log, checkpoints and figures to ./output. Ctrl-C or SIGTERM lets the ranks finish their step,
# save and end; a second one ends them at once.
# --device D       CPU or Ascend (default: MINDSPEED_MS_DEVICE, else Ascend where the machine has one)
# Environment: MINDSPEED_MS_DEVICE=CPU|Ascend, as --device; for several machines set LOCAL_WORKER_NUM, NODE_RANK,
# MASTER_ADDR and MASTER_PORT on each of them, as in msrun.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
log_dir=msrun_log

fail() { echo "pretrain_gpt.sh: error: $1" >&2; exit 2; }

world=""
device=${MINDSPEED_MS_DEVICE:-}
has_config=""
arguments=()
while (($#)); do
    case $1 in
        --world) (($# > 1)) || fail "--world needs a number"; world=$2; shift 2 ;;
        --world=*) world=${1#*=}; shift ;;
        --device) (($# > 1)) || fail "--device needs CPU or Ascend"; device=$2; arguments+=("$1" "$2"); shift 2 ;;
        --device=*) device=${1#*=}; arguments+=("$1"); shift ;;
        --help | -h) sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
                     echo "All flags: python $here/pretrain_gpt.py --help"; exit 0 ;;
        *) [[ $1 == --config || $1 == --config=* ]] && has_config=yes; arguments+=("$1"); shift ;;
    esac
done
[[ -z $world || $world =~ ^[1-9][0-9]*$ ]] || fail "--world is '$world': expected a positive number"

# msrun starts `python` of the PATH: it must be the one that has the package.
python=$(command -v python || command -v python3) || fail "there is no python on the PATH"
"$python" -c "import mindspeed_ms" 2> /dev/null || fail "$python does not have mindspeed_ms. Run: pip install -e $(dirname "$here")"
command -v msrun > /dev/null || fail "there is no msrun on the PATH; it comes with mindspore. Run: pip install -e $(dirname "$here")"

if [[ -z $device ]]; then
    device=CPU
    if compgen -G "/dev/davinci[0-9]*" > /dev/null || command -v npu-smi > /dev/null; then device=Ascend; fi
fi
if [[ ${device,,} == ascend ]]; then
    export HCCL_BUFFSIZE=${HCCL_BUFFSIZE:-200}
    export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-600}
    export ASCEND_RT_VISIBLE_DEVICES=${ASCEND_RT_VISIBLE_DEVICES:-'0,1,2,3,4,5,6,7'}
    default_configs=("$here"/config/38BV3/*.yaml)
else
    default_configs=("$here"/../configs/cpu_default/{model,accelerate,train}.yaml)
fi
[[ -n $has_config ]] || arguments=(--default-config "${default_configs[@]}" ${arguments[@]+"${arguments[@]}"})

# Mistakes in the configuration show here, once, before any rank starts; the corpus is built here too.
if [[ -n $world ]]; then export MS_WORKER_NUM=$world; fi
world=$("$python" "$here/pretrain_gpt.py" --prepare "${arguments[@]}") || exit 2
[[ $world =~ ^[1-9][0-9]*$ ]] || fail "the preparation printed '$world' instead of the number of ranks"
unset MS_WORKER_NUM

free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=${MASTER_PORT:-$("$python" -c "$free_port")}
local_world=${LOCAL_WORKER_NUM:-$world}
options=(--worker_num="$world" --local_worker_num="$local_world" --master_port="$port" --log_dir="$log_dir" --join=True
         --cluster_time_out=300)
[[ -z ${MASTER_ADDR:-} ]] || options+=(--master_addr="$MASTER_ADDR")
[[ -z ${NODE_RANK:-} ]] || options+=(--node_rank="$NODE_RANK")
first_rank=$((${NODE_RANK:-0} * local_world))
first_log=$log_dir/worker_$first_rank.log

mkdir -p "$log_dir" || exit 1
if ((local_world == world)); then  # other machines may share the folder
    rm -f "$log_dir"/worker_*.log
else
    for ((rank = first_rank; rank < first_rank + local_world; rank++)); do rm -f "$log_dir/worker_$rank.log"; done
fi

export MINDSPEED_MS_JOB=$$.$port  # by this the ranks are found

ranks() {  # process ids of this job's ranks (msrun also runs a scheduler, and processes that show logs)
    local file
    for file in $(grep -zlx "MINDSPEED_MS_JOB=$MINDSPEED_MS_JOB" /proc/[0-9]*/environ 2> /dev/null); do
        grep -zqx MS_ROLE=MS_WORKER "$file" 2> /dev/null \
            && grep -q pretrain_gpt.py "${file%environ}cmdline" 2> /dev/null && echo "$file" | tr -cd '0-9\n'
    done
}
interrupts=0 killed="" msrun_pid=""
interrupt() {
    interrupts=$((interrupts + 1))
    local found msrun=${msrun_pid:-${!:-}}
    if [[ -z $msrun ]]; then  # nothing has started
        echo "Interrupted before the ranks started." >&2
        exit 130
    fi
    found=$(ranks)
    if [[ -z $found || $interrupts -gt 2 ]]; then  # the ranks are not there yet, or do not listen
        killed=yes
        kill -KILL -- "-$msrun" "$msrun" $found 2> /dev/null
    else
        kill -TERM $found 2> /dev/null
    fi
}
trap interrupt INT TERM HUP

echo "Starting $world ranks on $device; logs: $PWD/$log_dir"

# In a session of its own msrun does not see Ctrl-C: it would kill the ranks before they have saved.
PATH=$(dirname "$python"):$PATH setsid msrun "${options[@]}" "$here/pretrain_gpt.py" "${arguments[@]}" > "$log_dir/msrun.log" 2>&1 &
msrun_pid=$!
"$python" -m mindspeed_ms.tools.follow_log "$first_log" --process "$msrun_pid" &
follower_pid=$!

# msrun waits for its scheduler, which may wait for ranks that ended before it knew them.
(
    idle=0
    while kill -0 "$msrun_pid" && ((idle < 5)); do
        sleep 2
        if [[ -e $first_log && -z $(ranks) ]]; then idle=$((idle + 1)); else idle=0; fi
    done
    kill -KILL -- "-$msrun_pid"
) > /dev/null 2>&1 &
watch_pid=$!

while kill -0 "$msrun_pid" 2> /dev/null; do wait "$msrun_pid"; done 2> /dev/null
wait "$msrun_pid" 2> /dev/null
status=$?
trap - INT TERM HUP
kill "$watch_pid" 2> /dev/null
wait "$follower_pid"
kill -KILL -- "-$msrun_pid" $(ranks) 2> /dev/null  # something is left only if msrun itself was killed

# ranks that a signal met before they listened have ended by it
((interrupts && status)) && ! grep -q "received: finishing this step" "$log_dir"/worker_*.log 2> /dev/null && killed=yes
if [[ -n $killed ]]; then
    echo "Interrupted before the ranks could save: the job was ended at once." >&2
    exit 130
fi
if ((status)); then
    echo "The job failed (exit code $status). Logs: $PWD/$log_dir/worker_*.log, $PWD/$log_dir/msrun.log" >&2
    touch "$first_log"  # it was shown; of the other logs say what may be the cause
    for log in "$log_dir"/worker_*.log; do
        [[ $log == "$first_log" ]] \
            || grep -hE "rank [0-9]+ \(pid [0-9]+\) died|^[^ ]+: error: |^[A-Za-z_.]*(Error|Exception)\b" "$log"
    done | awk 'FILENAME != "-" { seen[$0] = 1; next } !seen[$0]++' "$first_log" - | head -n 5 >&2
fi
exit "$status"
