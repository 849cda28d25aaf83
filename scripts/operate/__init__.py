"""The parts of the operators' tools: scripts/doctor.py, selftest.py, tune.py and batch.py.

    findings        ok, warn and fail lines, as text and as JSON         doctor, selftest
    server_process  scripts/serve.py in a process group of its own       selftest, tune
    machine, model_folder, memory_table                                  doctor
    checks                                                               selftest
    candidates, trial, search, verdict                                   tune
    batch_input, batch_file, batch_run, batch_signals, local_link        batch

Command lines are read before anything heavy is imported, so that --help is instant.
"""
