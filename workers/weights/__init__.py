"""The weight transfer that trainer and replicas share.

One group per replica: the trainer's rank 0 is rank 0 and hosts the rendezvous, the replica's engine ranks follow.
`transfer` holds what both ends agree on (tensors, buckets, errors, the `Sender` interface and `make_sender`); `gloo`
and `nccl` carry the bytes; `vllm_extension` is the receiving end inside vLLM's worker process. Importing this package
or `transfer` loads no torch.
"""
