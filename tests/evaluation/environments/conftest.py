from tests.docker_engine import docker_engine as docker_engine
