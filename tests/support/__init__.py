"""What tests share, and what programs outside this repository may use to start, attack and measure the services.

The names below stay in their modules, with the parameters they have; new ones may be added.
`tests/unit/test_support.py` imports each of them. Everything else here is for the tests of this repository and may move
at any time.

    cluster                      running_cluster Cluster Stubs Answer request ctl free_port children_of wait_for_log
    plain_services               plain_services PlainServices
    warm_process                 WarmProcess run_warm warm_server
    terminal                     terminal Terminal screen_lines
    clients.http_clients         client async_client events named_events request_bytes connect connect_socket
    clients.streams              Collected collect collect_all messages_of_every_kind
    clients.steady_stream        SteadyStream wait_until
    clients.inference_messages   message output texts int32
    clients.stalling_proxy       stalling_proxy
    clients.http2_frames         frame begin call
    clients.wire_format          varint field repeated
    undisturbed                  assert_undisturbed LoopPings cpu_s
    process_memory               resident_bytes
    scrape                       Scrape read_table
    observed                     running_observed Observed
    expensive_bodies             functions flat with_input_schemas wide_schema encoded
    certificates                 Authority Pair
    models                       make_model_dir
    reference                    make_served_model reference_model reference_tokens reference_beams random_prompts
    adapters                     make_adapter merge_adapter
    dense.medusa_heads           heads_that_know
    dense.eagle_head             head_that_knows

`running_cluster(directory, "section.key=value", ...)` is where most programs begin: a launcher with its services on
Unix sockets in `directory`, which must stop cleanly at the end and leave no process and no shared memory.

    with running_cluster(directory, "scheduler.max_num_seqs=8") as cluster:
        undisturbed = collect(cluster.gateway, request("San Francisco is a", 100))
        killing = threading.Timer(0.2, cluster.kill, ["dense_worker"])
        killing.start()
        collect(cluster.gateway, request("San Francisco is a", 100)).assert_equals(undisturbed)
        killing.join()
"""
