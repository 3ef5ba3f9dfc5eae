"""The coordinator: one process with one event loop that keeps every worker busy and owns the run's state.

    run.py       a run's life from start to summary        fleet/     the workers: server, sessions, pools
    start.py     where a run begins, or resumes            sampling/  where trajectories come from and go to
    summary.py   what a finished run leaves behind         training/  updates of the policy, and weight sync
                                                           service/   what people and other programs see

Nothing in here imports torch, vllm or a worker. Plain objects in `dart.core` decide what to do next; the loops below
wait, carry out the decision, and report the result to those objects.

    env workers                        replicas                                  train ranks
      |   ^ Reset, Act, Release          |   ^ Generate                            |   ^ TrainBatch, SendWeights
      v   |                              v   |                                     v   |
    EnvPool -- free environment --> episode (one task for each trajectory)       TrainerRanks
                                       |   ^ order                                 |   ^ batch
                     finished, failed  v   |                                       v   |
                                     DataManager -- released groups, by batches --> Training -- version --> WeightSync
                                       |                                                                  |
                                       v                                                                  v
                                     Database (durable before anything counts it)       one replica at a time

Each loop, what it consumes, what it waits for, and what wakes it:

    loop                  consumes                 waits for                  woken by
    --------------------- ------------------------ -------------------------- ----------------------------------
    sample (episodes)     free environments        an environment             an episode that ends, or a worker
                                                                              that joins or renews one
                          orders                   DataManager.next: budget,  a group that is consumed or
                                                   schedule, pause            dropped; Control.Resume
    an episode            its environment's reply  the reply                  the session; a lost worker fails it
                          turns of the policy      a replica with capacity    a request that ends, a replica
                                                                              that joins, serves again or has
                                                                              rested after failures
    Training._updates     batches                  enough released groups     a trajectory that closes a group
                          the update               every rank's Trained       the session; a lost rank ends it
    WeightSync.run        published versions       a replica that may be      an update, a transfer that ends,
                                                   updated                    a replica that joins or leaves
    a transfer            both ends' replies       the replica and rank 0     the session, or sync.timeout_seconds
    Fleet.reap            heartbeats               the next deadline          the clock: silence and late replies
                                                                              are events too
    Journal.write_events  events                   an event                   whoever records one
    the watchdog          the times of progress    its bound                  the clock
    Housekeeping.run      the run's files          its pauses                 the clock; it checks that they are still
      (two loops)                                                             there, and removes what nothing needs
    Run._watch_stop       Ctrl-C, SIGTERM          the signal                 the user
    Run._watch_trainer    the loss of a rank       TrainerRanks.lost          the session; the run then ends, and
                                                                              `dart train` resumes it

Back-pressure goes against the arrows. When the trainer falls behind, released groups wait, the budget of trajectories
begun but not yet consumed is used up, `next` waits, and environments are idle; their ledger says why ("the trainer is
behind"). When replicas fall behind, requests wait in a queue, and environments are queued ("the replicas are full"). No
queue in here grows without bound: there is at most one request and one order for each environment, and one command for
each credit of a worker.

An infrastructure failure travels the other way: a lost worker fails the calls that wait for it. A turn is then
requested from another replica. If an environment failed, or no replica can serve the turn, the episode ends as a failed
attempt, and the same roll-out is scheduled again. It is never a reward. An invalid message from a worker is that
worker's failure (`dart.wire.rules`), not the run's.
"""
