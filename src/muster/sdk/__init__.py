"""The SDK: handles on trainings, for a user's own program.

`effects` says what a flow may ask for, `flows` holds all the logic as generators, `drive` carries flows out
synchronously and asynchronously, `home` knows the user's own control plane, `find` looks for the one to talk to,
`submission` turns Python arguments into a request; `client` and `training` are what users see, `functions` and `call`
run a decorated function in every rank.
"""
