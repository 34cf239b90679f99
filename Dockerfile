# The server with one model:
#   docker build -t sedd .
#   docker run --rm -p 127.0.0.1:8321:8321 -v "$PWD/run:/model:ro" sedd
# On a machine without a GPU, PyTorch's index of CPU wheels as PIP_EXTRA_INDEX_URL makes the image smaller by
# gigabytes; torch, which has other hashes there, is then taken by its version.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml constraints.txt requirements.lock install_locked.py README.md LICENSE ./
COPY src src
RUN UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 python install_locked.py '.[serve]' && rm -r /build/src
RUN useradd --create-home sedd
USER sedd
WORKDIR /home/sedd
EXPOSE 8321
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8321/health', timeout=5)"]
ENTRYPOINT ["sedd", "serve", "--host", "0.0.0.0"]
CMD ["/model"]
