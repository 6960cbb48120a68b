# A network behind HTTP, on the CPU:
#   docker build -t equilibria .
#   docker run --rm -p 8000:8000 -v "$PWD/run:/model:ro" equilibria
FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[serve]" && useradd --create-home serve
USER serve
WORKDIR /home/serve
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# exec form: SIGTERM reaches the server, which answers what it has taken on and ends.
ENTRYPOINT ["equilibria", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--port", "8000"]
