from importlib.util import find_spec

if find_spec("obstore") and find_spec("moto"):  # the test modules are skipped without them
    from extras.cloud.spoiled_bucket import bucket, new_process, server

    __all__ = ["bucket", "new_process", "server"]
