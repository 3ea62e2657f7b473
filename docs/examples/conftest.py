"""Makes the fixtures `world` and `on_pool` known to the tests of this folder."""

pytest_plugins = ["dist_infer.launch.pytest_world"]
