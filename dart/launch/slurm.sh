
# What follows is the same for every run. Started by sbatch, this script starts an srun for each part of the run; each
# of its tasks is this script again, with the part's name, which keeps one process of the run alive.

pause_seconds=5
asking_seconds=600    # of Slurm's controller, before an answer is given up
worker_failed=1       # exit code of a job whose process cannot go on
stopping=""
child=""

finished() { [ -e "$run/summary.json" ]; }

begun() { [ -e "$run/config.yaml" ]; } # wherever its database is

checkpoints() { echo "$run"/checkpoints/v*; }

# keep NAME COMMAND...: run it again and again, until the run is finished, this shell is told to stop, or it has failed
# too often. Coordinator and trainer begin again from the newest checkpoint: without a new one they get nowhere, however
# long they take to fail. A worker that has lasted has worked, unless it was never ready.
# A coordinator that is to be started again says goodbye to its workers: they end with 0, and are started again as well.
keep() {
    local name=$1 failures=0 code started before
    shift
    until finished || [ -n "$stopping" ]; do
        started=$SECONDS
        before=$(checkpoints)
        "$@" &
        child=$!
        wait "$child"
        code=$?
        while kill -0 "$child" 2>/dev/null; do # a signal has ended `wait` before the command
            wait "$child"
            code=$?
        done
        child=""
        if [ "$code" -eq "$interrupted" ]; then stopping=1; fi
        if [ "$code" -eq "$user_error" ] && ! begun; then return "$code"; fi
        if finished || [ -n "$stopping" ]; then break; fi
        case $name in
        coordinator | train) if [ "$(checkpoints)" != "$before" ]; then failures=0; fi ;;
        *)
            if [ $((SECONDS - started)) -gt "$lasting_seconds" ] && [ "$code" -ne "$not_ready" ]; then failures=0; fi
            ;;
        esac
        if [ "$code" -ne 0 ]; then failures=$((failures + 1)); fi
        echo "$(date +%FT%T) $name ended with code $code; failures in a row: $failures"
        if [ "$failures" -gt "$most_restarts" ]; then return "$code"; fi
        sleep "$pause_seconds"
    done
    finished || return "$interrupted"
}

pass_on() {
    stopping=1
    [ -z "$child" ] || kill -TERM "$child"
}

# asked COMMAND...: again and again until it succeeds, for Slurm's controller may be away for a while.
asked() {
    local began=$SECONDS
    until "$@"; do
        if [ $((SECONDS - began)) -gt "$asking_seconds" ]; then return 1; fi
        echo "$(date +%FT%T) $1 failed; it is tried again" >&2
        sleep "$pause_seconds"
    done
}

end_coordinator() { scancel --signal=TERM "$SLURM_JOB_ID+0" || ! kill -0 "$coordinator" 2>/dev/null; }

# One task of an srun.
process() {
    local part=$1
    # Those of the shell that submitted the job: a worker finds its own token in the run's directory.
    if [ "$part" != coordinator ]; then unset DART_TOKEN DART_VIEW_TOKEN; fi
    prepare "$part"
    case $part in
    coordinator)
        trap pass_on TERM
        keep "$part" "$python" -m dart coordinator "$config" --run "$run" --host "$host" --quiet --again "$continuing" \
            --set "checkpoint.interrupt_seconds=$save_seconds"
        ;;
    train)
        # Slurm's SIGTERM reaches every process at once, and the coordinator still wants a checkpoint.
        trap '' TERM
        if [ "$SLURM_NTASKS" -gt 1 ]; then
            export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
            case ${CUDA_VISIBLE_DEVICES-} in
            "" | *,*) ;;
            *) LOCAL_RANK=0 ;; # Slurm shows it no GPU but its own
            esac
        else
            unset RANK WORLD_SIZE LOCAL_RANK # of whatever the job was submitted from
        fi
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
        export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give out
        exec "$python" -m dart worker --role train --run "$run" --id train
        ;;
    *)
        trap pass_on TERM
        keep "$part-$SLURM_PROCID" "$python" -m dart worker --role "$part" --run "$run" --id "$part-$SLURM_PROCID"
        ;;
    esac
}

# srun would kill its tasks at SIGTERM, which they get from Slurm themselves.
step() {
    trap '' TERM USR1 USR2
    # shellcheck disable=SC2086 # they are words
    exec srun ${steps[$1]} --mpi=none --kill-on-bad-exit=1 "${output[@]}" bash "$script" "$1"
}

# The workers of a part, beside the coordinator. Ranks of one trainer cannot be started again one by one.
workers() {
    trap '' TERM USR1 USR2
    if [ "$1" = train ]; then
        output=(--output="$logs/train-%t.log" --open-mode=append --wait=60)
        keep train step train
    else
        output=(--output="$logs/$1-%t.log" --open-mode=append)
        (step "$1")
    fi
    local code=$?
    if [ "$code" -ne 0 ] && [ "$code" -ne "$interrupted" ]; then
        echo "$(date +%FT%T) $1 cannot go on (code $code): see $run/logs/$1-*.log"
        kill -USR2 $$
    fi
}

# Slurm's own requeue, of a job that it ends, needs no help; one that its user has cancelled must not come back.
again() {
    local states
    states=$(asked squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [ "$requeue" = yes ] && [ "${states%%$'\n'*}" = RUNNING ]; then
        echo "$(date +%FT%T) interrupted; the job queues again"
        asked scontrol requeue "$SLURM_JOB_ID"
    else
        echo "$(date +%FT%T) interrupted; continue with this command:"
        echo "dart launch slurm $(printf %q "$config") --run $(printf %q "$run")"
    fi
    exit "$interrupted"
}

job() {
    local coordinator="" part failed="" signalled="" code
    output=()
    # shellcheck disable=SC2046 # they are numbers
    trap 'kill -KILL $(jobs -p) 2>/dev/null' EXIT # parts are started again no more; Slurm ends their steps
    trap 'signalled=1; asked end_coordinator' USR1
    trap 'failed=1; asked end_coordinator' USR2
    trap : TERM
    (step coordinator) &
    coordinator=$!
    for part in "${!steps[@]}"; do
        [ "$part" = coordinator ] || workers "$part" &
    done
    while kill -0 "$coordinator" 2>/dev/null; do
        wait "$coordinator"
        code=$?
    done
    if finished; then exit 0; fi
    if [ -n "$failed" ]; then exit "$worker_failed"; fi
    if [ -n "$signalled" ] || [ "$code" -eq "$interrupted" ]; then again; fi
    exit "$code"
}

if [ $# -eq 0 ]; then job; else process "$1"; fi
