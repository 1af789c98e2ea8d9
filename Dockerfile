# The image of the api, migrate and worker services in docker-compose.yml. Not yet built.
FROM python:3.11-slim

# torch.compile and AOTInductor build C++ on CPUs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/torchstone
COPY pyproject.toml constraints.txt README.md ./
COPY torchstone torchstone
COPY service service
COPY worker worker
RUN pip install --no-cache-dir -c constraints.txt '.[service,worker,onnx]' \
    && useradd --create-home torchstone \
    && install -d -o torchstone -g torchstone /srv/torchstone/data /srv/torchstone/artifacts
USER torchstone
EXPOSE 8000
CMD ["torchstone", "up", "--host", "0.0.0.0", "--data", "/srv/torchstone/data"]
