{{- define "torchere.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
{{- end -}}

{{- define "torchere.resources" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $limits := merge (deepCopy $v.limits) (.Values.resources.limits | default dict) -}}
{{- $requests := merge (deepCopy $v.requests) (.Values.resources.requests | default dict) -}}
{{- if gt (int $v.gpus) 0 -}}
{{- $_ := set $limits .Values.gpu.resourceName ($v.gpus | int) -}}
{{- end -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{- define "torchere.mounts" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
- {name: scratch, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if eq $v.configFrom "chart" }}
- {name: config, mountPath: /etc/torchere, readOnly: true}
{{- end }}
{{- if eq $v.configFrom "volume" }}
- {name: store, mountPath: {{ $v.mount }}, readOnly: true}
{{- else if ne $v.storeType "bundled" }}
{{- $subPath := dig $v.storeType "subPath" "" .Values.modelStore }}
- {name: store, mountPath: {{ include "torchere.store" . }}, readOnly: true{{ with $subPath }}, subPath: {{ . }}{{ end }}}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /run/torchere-tls, readOnly: true}
{{- end }}
{{- if and .Values.auth.enabled .Values.auth.secretName }}
- {name: keys, mountPath: /run/torchere-keys, readOnly: true}
{{- else if .Values.auth.enabled }}
- {name: keys, mountPath: /run/torchere}
{{- end }}
{{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{- define "torchere.volumes" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.scratch }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- if eq $v.configFrom "chart" }}
- name: config
  configMap: {name: {{ include "torchere.fullname" . }}}
{{- end }}
{{- if eq $v.storeType "pvc" }}
- name: store
  persistentVolumeClaim: {claimName: {{ $v.claimName }}, readOnly: true}
{{- else if eq $v.storeType "image" }}
- name: store
  image: {reference: {{ include "torchere.mirrored" (dict "image" .Values.modelStore.image.reference "root" .) | quote }}, pullPolicy: {{ .Values.modelStore.image.pullPolicy }}}
{{- else if ne $v.storeType "bundled" }}
- name: store
  emptyDir: {sizeLimit: {{ .Values.modelStore.sizeLimit }}}
{{- end }}
{{- if and (eq $v.storeType "gcs") .Values.modelStore.gcs.secretName }}
- name: store-credentials
  secret: {secretName: {{ .Values.modelStore.gcs.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if and .Values.auth.enabled .Values.auth.secretName }}
- name: keys
  secret:
    secretName: {{ .Values.auth.secretName }}
    defaultMode: 0440
    items: [{key: {{ .Values.auth.secretKey }}, path: keys.json}]
{{- else if .Values.auth.enabled }}
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- with .Values.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{/* The container that fills the store before the server starts; nothing where it is mounted. */}}
{{- define "torchere.initContainers" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $fetched := has $v.storeType (list "s3" "gcs" "azure" "init") -}}
{{- if or $fetched .Values.extraInitContainers -}}
initContainers:
{{- if $fetched }}
  - name: fetch-models
    {{- if eq $v.storeType "s3" }}
    {{- $s3 := .Values.modelStore.s3 }}
    image: {{ include "torchere.mirrored" (dict "image" $s3.image "root" .) | quote }}
    command: [aws]
    args: [s3, sync, --only-show-errors, {{ $s3.uri | quote }}, /mnt/model-store]
    env:
      - {name: HOME, value: /tmp}
      {{- with $s3.endpointUrl }}
      - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
      {{- end }}
      {{- with $s3.region }}
      - {name: AWS_REGION, value: {{ . | quote }}}
      {{- end }}
    {{- with $s3.secretName }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    {{- else if has $v.storeType (list "gcs" "azure") }}
    {{- $source := get .Values.modelStore $v.storeType }}
    image: {{ include "torchere.mirrored" (dict "image" .Values.modelStore.initializerImage "root" .) | quote }}
    args: [{{ $source.uri | quote }}, /mnt/model-store]
    env:
      - {name: HOME, value: /tmp}
    {{- if and (eq $v.storeType "gcs") $source.secretName }}
      - {name: GOOGLE_APPLICATION_CREDENTIALS, value: {{ printf "/run/store-credentials/%s" $source.secretKey | quote }}}
    {{- else if $source.secretName }}
    envFrom:
      - secretRef: {name: {{ $source.secretName }}}
    {{- end }}
    {{- else }}
    {{- $init := .Values.modelStore.init }}
    image: {{ include "torchere.mirrored" (dict "image" $init.image "root" .) | quote }}
    {{- with $init.command }}
    command: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $init.args }}
    args: {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
      - {name: HOME, value: /tmp}
      - {name: MODEL_STORE, value: /mnt/model-store}
      {{- with $init.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- with $init.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    resources:
      requests: {cpu: 100m, memory: 256Mi}
      limits: {memory: 1Gi}
    securityContext: {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      - {name: store, mountPath: /mnt/model-store}
      - {name: scratch, mountPath: /tmp}
      {{- if and (eq $v.storeType "gcs") .Values.modelStore.gcs.secretName }}
      - {name: store-credentials, mountPath: /run/store-credentials, readOnly: true}
      {{- end }}
{{- end }}
{{- with .Values.extraInitContainers }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
{{- end -}}
