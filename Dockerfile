# Two images:
#     docker build --target front-end -t gateway:front-end .    # no torch, no ray: bench, status, ranks, simulate, simulated engines
#     docker build -t gateway .                                 # everything: torch and ray, too
# Both run as a user without rights, listen on port 8000 and keep models in /var/lib/gateway: mount a volume there.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS front-end
RUN useradd --system --create-home --home-dir /var/lib/gateway gateway
WORKDIR /opt/gateway
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gateway gateway
COPY cores cores
COPY balancer balancer
RUN pip install --no-cache-dir --constraint constraints.txt .
USER gateway
WORKDIR /var/lib/gateway
VOLUME /var/lib/gateway
EXPOSE 8000
# SIGTERM lets requests finish: give it more than --shutdown-timeout (30 s), as in `docker run --stop-timeout 75`.
STOPSIGNAL SIGTERM
# Process 1 of a container must reap what others leave: `docker run --init`.
ENTRYPOINT ["gateway"]
CMD ["--help"]

FROM front-end AS full
USER root
WORKDIR /opt/gateway
RUN pip install --no-cache-dir --constraint constraints.txt ".[cores,tracing]"
USER gateway
WORKDIR /var/lib/gateway
# Of the port below, in plain HTTP: with another one or TLS give your own, `docker run --health-cmd ...`.
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
