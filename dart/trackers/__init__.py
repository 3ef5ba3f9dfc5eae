"""Experiment trackers: what a run's directory holds, sent to TensorBoard, W&B, Trackio, MLflow or SwanLab.

    run directory ── dart.inspection ── following.py ── Tracker ──┬── tensorboard.py
                                        what is new since          ├── weights_and_biases.py   W&B and Trackio
                                        the last look              ├── mlflow.py
                                                                   └── swanlab.py

It runs in a process of its own (`dart track`), which `dart train` starts where `tracking.to` names a tracker. A tracker
that hangs, leaks or fails cannot hurt the run, and a run that was never tracked, or was killed, can be sent afterwards.
"""
