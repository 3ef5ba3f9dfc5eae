"""Names that the rollout worker and the code inside vLLM's worker process share. Imports nothing."""

OWNER_VARIABLE = "DART_ENGINE_OWNER"
"""Environment variable with the pid of the process without which an engine process must not live."""
EXTENSION = "dart.workers.weights.vllm_extension.Extension"
"""What vLLM is told to import in its worker process."""
