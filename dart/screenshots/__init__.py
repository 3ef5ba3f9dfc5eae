"""Screenshots by the SHA-256 of their encoded bytes: where the bytes are, and what keeps them.

A screenshot (`dart.core.types.Image`) travels with its bytes or by its digest alone. By digest alone, its bytes are

- in the run's directory (`directory`), which env workers with access write to, and replicas and the trainer read from
  (`shared`); the coordinator finds them through its blob store (`stored`);
- at the receiver, which keeps the newest ones that it was sent (`held`). The coordinator mirrors what each replica
  keeps, so that it knows when it may omit the bytes. Mirror and keeper are the same class and note the same digests in
  the same order, once for each screenshot of each message, which keeps them equal.

`lookup` is the one place that finds a screenshot's bytes at a worker and checks them; `header` reads a picture's size
without decoding it, so that decompression bombs are never decoded. Everything here is importable without torch and
without Pillow, which `picture` loads where it decodes.
"""
