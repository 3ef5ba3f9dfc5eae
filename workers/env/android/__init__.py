"""The world `android`: phones, tablets and emulators, driven by `adb` (docs/android.md).

`world` is what the env worker sees; `device` is one device, `adb` the program that reaches it, `gestures` turns actions
into its commands. Tasks come from AndroidWorld's own server (`benchmark`) or from a folder (`tasks`).
"""
