"""The SDK: handles on trainings, for a user's own program.

`effects` says what a flow may ask for, `flows` holds all the logic as generators, `drive` carries flows out
synchronously and asynchronously, `find` looks for the control plane, `submission` turns Python arguments into a
request; `client` and `training` are what users see, `functions` and `call` run a decorated function in every rank.
"""
