"""Where trainings are kept: one ledger of versions and history, in memory (`memory`) or on disk (`sqlite`).

Both adapters implement `ports.Store` and pass the contract suite in tests/contract. They share `ledger`, which
decides what a write means; they differ only in when a decided write counts as committed.
"""
