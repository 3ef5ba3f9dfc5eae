"""Starting a run on a cluster that exists: Ray, Slurm, Kubernetes. No cluster manager of our own.

`plan` says what a run consists of, whatever starts it: groups of equal processes, each with its command and what it
needs. Each engine turns that plan into its own terms, and leaves restarts, logs and GPUs to the cluster:

    ray     actors in placement groups, each of which is nothing but one of these processes
    slurm   one heterogeneous job, with an `srun` for each group
    k8s     a Helm chart: a StatefulSet for the coordinator, a workload for each group

On all of them the coordinator is `dart coordinator CONFIG --run RUN`, which begins the run or continues it, so that a
restart needs no human; and workers are `dart worker`, which dial it again.
"""
