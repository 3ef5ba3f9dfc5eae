"""The train worker: Accelerate ranks that turn released samples into the next weight version."""
