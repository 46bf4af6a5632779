"""The command line ``p2pkv``: one module per command, over the client library and the files of the home (``docs/cli.md``)."""
