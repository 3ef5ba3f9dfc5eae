"""The coordinator: one process, one event loop, that keeps every worker busy and owns the run's state.

    server     the gRPC server: sessions of workers, the Control service, health, reflection, tokens, TLS
    sessions   one `Worker` per connected worker: credits, calls and replies, heartbeats, reconnecting
    pools      the environments and replicas of the fleet as resources: take a free one, give it back
    episodes   one coroutine per trajectory; an environment that finishes takes the next order at once
    data       the data manager: groups close, are judged, stored, and fed to the trainer
    ranks      the trainer's ranks as one: updates, checkpoints, weights to send
    training   the training phase: sampling and updates side by side, stop conditions
    syncing    rolling weight sync, replica by replica
    evaluation, collecting   the other two things that episodes are run for
    journal    events: metrics.jsonl, the database, watchers; `core.progress` has the counters
    status     what the run is doing, for Control and the live view
    start      where a run begins, or goes on
    welcome    what each role is told when it joins
    run        a run's life from start to summary

Nothing in here imports torch, vllm or a worker.
"""
