"""A device that the real adb program talks to, and a server with the routes of AndroidWorld's. Both are processes.

They prove how dart speaks to devices and servers, and where its touches land. They are no Android.
"""
